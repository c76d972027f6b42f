"""The loop: prompts → rollout → reward → score → advantage → update → sync → log.

The trainer does not know which algorithm runs, nor how models are laid out: it asks the algorithm which scores it
needs, and the cluster for passes over rows.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from megarl.algos.value_loss import ValueLoss
from megarl.cluster import Cluster, EngineSupervisor, residency
from megarl.config.batches import actor_learns, batch_counts, mini_batch_prompts, num_actor_steps
from megarl.host.signals import stop_on_signals
from megarl.record.metrics import MetricsLogger, Timers
from megarl.record.performance import PerformanceMeter
from megarl.record.profiling import StepProfiler
from megarl.record.progress import Progress, ProgressValues
from megarl.record.recorder import RunRecorder, batch_metrics, resident_memory
from megarl.rewards.build import open_panel, reward_manager
from megarl.rewards.manager import Panel
from megarl.rollout.prefixes import plan_prefixes
from megarl.rollout.replay import ReplaySource, record_path, write_record
from megarl.rollout.source import OnSample, RolloutSource, SamplingPlan, batch_seed, ignore_sample
from megarl.rollout.vllm_source import VllmSource
from megarl.train.checkpoint import Checkpoint, CheckpointManager, RunState
from megarl.train.collect import Collected, GroupCollector, PromptQueue
from megarl.train.export import export_model
from megarl.train.gate import MismatchGate, engines_differ, mismatch_of
from megarl.train.inputs import TrainInputs, max_reward_tokens, open_sampler
from megarl.train.model_judge import ModelJudge, ModelRewards
from megarl.train.rows import require_routed_experts, training_rows
from megarl.train.score import ScoringPasses, with_scores
from megarl.train.update import CountedObjective, RoleScorer, RoleUpdater, update_on_batch
from megarl.train.validate import validate
from megarl.types import Advantages, FinishReason, Prompt, RolloutBatch, Row, Score, scored_batch
from megarl.types.messages import LoadRequest, Role
from megarl.weights.safetensors_map import weight_specs


class Trainer:
    """One run on a cluster. Several trainers may use the same cluster one after the other."""

    def __init__(self, inputs: TrainInputs, cluster: Cluster, recorder: RunRecorder) -> None:
        config = inputs.config
        cluster.check_serves(config, inputs.roles)
        self.inputs, self.config, self.cluster, self.recorder = inputs, config, cluster, recorder
        self.algorithm, self.state = inputs.algorithm, inputs.algorithm.initial_state()
        self.timers = Timers()
        self.roles, self.counts = inputs.roles, batch_counts(config)
        self.has_critic = any(role.role is Role.CRITIC for role in self.roles)
        self.memory = residency.MemoryLedger(cluster.workers, cluster.engines, enabled=config.placement.offload)
        self.meter = PerformanceMeter(config, inputs.spec.dims)
        self.profiler = StepProfiler(cluster.workers, config.logging.profile_steps, recorder.paths.profile)
        self.checkpoints = CheckpointManager(recorder.paths.checkpoints, config.checkpoint, cluster.workers)
        self.engines = EngineSupervisor(
            cluster,
            self.memory,
            partial(cluster.weight_sync, weight_specs(inputs.spec, config.model.dtype)),
            max_restarts=config.rollout.max_engine_restarts,
            deterministic=config.run.deterministic,
            verify=config.sync.verify,
        )
        self.source = self._rollout_source()
        self.gate = MismatchGate(config)
        scorers = {
            role.role: RoleScorer(cluster.workers, role, temperature=config.rollout.temperature) for role in self.roles
        }
        panel = self._open_panel(scorers)
        self.rewards = reward_manager(panel, inputs.tokenizer)
        sources = set() if inputs.val is None else inputs.val.data_sources
        by_rule = bool(sources) and all(map(panel.knows, sources))
        self.validation_rewards = reward_manager(panel.by_rule(), inputs.tokenizer) if by_rule else self.rewards
        self.queue = PromptQueue(open_sampler(config, inputs.train))
        self.collector = GroupCollector(
            self.queue,
            inputs.train,
            self.generate,
            self.rewards,
            cfg=config.algo.filter,
            num_prompts=config.trainer.prompts_per_step,
            timers=self.timers,
        )
        self.updaters = self._updaters()
        self.scoring = ScoringPasses(scorers=scorers, hints=inputs.hints, enter=self.memory.enter, timers=self.timers)

    def _updaters(self) -> dict[Role, RoleUpdater]:
        """One for every trained role, each with its own objective and schedule."""
        config, per_step = self.config, self.counts.optimizer_steps_per_step
        critic_loss = ValueLoss(clip=config.critic.value_clip)
        objectives: dict[Role, CountedObjective] = {Role.ACTOR: self.algorithm, Role.CRITIC: critic_loss}
        steps = {
            Role.ACTOR: num_actor_steps(config, has_critic=self.has_critic),
            Role.CRITIC: config.trainer.total_steps,
        }
        return {
            role.role: RoleUpdater(
                self.cluster.workers,
                role,
                objectives[role.role],
                total_steps=steps[role.role] * per_step,
                temperature=config.rollout.temperature,
            )
            for role in self.roles
            if role.trainable
        }

    def _open_panel(self, scorers: Mapping[Role, RoleScorer]) -> Panel:
        """Who judges."""
        inputs, model = self.inputs, None
        if inputs.conversations is not None:
            limit = max_reward_tokens(self.config)
            scorer = scorers[Role.REWARD]
            model = ModelJudge(ModelRewards(scorer, inputs.conversations, max_tokens=limit, enter=self.memory.enter))
        sources = inputs.train.data_sources | (set() if inputs.val is None else inputs.val.data_sources)
        return open_panel(self.config.rewards, sources, model=model)

    def fit(self, checkpoint: Checkpoint | None = None) -> None:
        """Train up to step `trainer.total_steps`, from a checkpoint if there is one; validate, export the result.

        Raises:
            RunStopped: a signal ended the run early; its checkpoint is complete.
        """
        config, total = self.config, self.config.trainer.total_steps
        self.memory.enter(residency.LOAD)
        self.cluster.workers.load(
            LoadRequest(roles=self.roles, seed=config.run.seed, deterministic=config.run.deterministic)
        )
        self.memory.add(residency.built_parts(self.roles))
        start = self._restore(checkpoint) if checkpoint else 0
        with (
            closing(self.rewards),
            self.recorder.metrics() as log,
            Progress(total=total, initial=start, description=config.run.name) as progress,
            stop_on_signals() as stop,
        ):
            if config.placement.offload:
                progress.note(residency.phase_table(residency.SYNC.needs, residency.step_phases(self.roles)))
            self._push(start)
            if start == 0 and config.validation.before_train:
                self._validate(0, log, progress)
            for step in range(start + 1, total + 1):
                with self.profiler.around(step):
                    self._train_step(step, log, progress)
                score = None
                if step % config.validation.every_steps == 0 or step == total:
                    score = self._validate(step, log, progress)
                self.checkpoints.after_step(step, total=total, stop=stop, state=partial(self._run_state, step, score))
        self._export()
        self.engines.close()

    def _export(self) -> None:
        """Every trained role, each in a directory of its own."""
        paths = {Role.ACTOR: self.recorder.paths.export, Role.CRITIC: self.recorder.paths.export_critic}
        for role in (role for role in self.roles if role.trainable):
            self.memory.enter(residency.exporting(role.role))
            export_model(self.cluster.workers, role, paths[role.role])

    def _push(self, version: int) -> dict[str, float]:
        return self.engines.push(version)

    def _restore(self, checkpoint: Checkpoint) -> int:
        """Continue where a checkpoint was taken; returns its step."""
        state = checkpoint.state
        self.cluster.workers.load_checkpoint(checkpoint.path, same_layout=checkpoint.same_layout(self.config))
        self.queue.load_state_dict(state.sampler)
        self.source.load_state_dict(dict(state.source))
        self.state = state.algo
        for role, count in ((Role.ACTOR, state.num_optimizer_steps), (Role.CRITIC, state.num_critic_steps)):
            if role in self.updaters:
                self.updaters[role].num_optimizer_steps = count
        self.gate.passed = state.gate_passed and not engines_differ(state.config, self.config)
        return state.step

    def _run_state(self, step: int, score: float | None) -> RunState:
        """Asked for when a checkpoint is about to be written."""
        self.memory.enter(residency.checkpointing(self.roles))
        steps = {role: updater.num_optimizer_steps for role, updater in self.updaters.items()}
        return RunState(
            command="train",
            step=step,
            num_optimizer_steps=steps[Role.ACTOR],
            num_critic_steps=steps.get(Role.CRITIC, 0),
            gate_passed=self.gate.passed,
            sampler=self.queue.state_dict(),
            algo=self.state,
            source=self.source.state_dict(),
            score=score,
            config=self.config,
        )

    def _train_step(self, step: int, log: MetricsLogger, progress: Progress) -> None:
        with self.timers("step"):
            collected = self.collector.collect(step)
            rows, metrics = self.learn(collected, step)
            with self.timers("sync"):
                metrics |= self._push(step)
        times = self.timers.pop()
        metrics |= {**collected.metrics, **times, **self.memory.metrics(), **self.engines.metrics()}
        if rows:
            metrics |= batch_metrics(collected.rollout)
            metrics["perf/tokens_per_s"] = sum(r.num_tokens for r in rows) / times["timing_s/step"]
        if (update_s := times.get("timing_s/update_actor")) is not None:
            metrics |= self.meter.metrics(rows, update_s)
        log.log(step, metrics | resident_memory(self.cluster.pids))
        self.recorder.sample_rollouts(step, collected.rollout, collected.rewards, self.inputs.tokenizer)
        progress.update(
            step,
            ProgressValues(
                reward=metrics.get("critic/rule_score/mean"),
                response_length=metrics.get("response_length/mean"),
                mismatch=metrics.get("mismatch/abs_mean"),
                tokens_per_s=metrics.get("perf/tokens_per_s"),
            ),
        )

    def generate(self, prompts: Sequence[Prompt], step: int, on_sample: OnSample = ignore_sample) -> RolloutBatch:
        """Sample a group for every prompt, after prefixes of demonstrations where the algorithm wants them.

        `on_sample` is told of each sample as it finishes.
        """
        rollout, demonstrations = self.config.rollout, self.config.algo.demonstrations
        prefixes = plan_prefixes(
            prompts,
            demonstrations,
            step=step,
            num_samples=rollout.num_samples,
            run_seed=self.config.run.seed,
            eos_token_id=self.inputs.tokenizer.eos_token_id,
        )
        plan = SamplingPlan(
            step=step,
            num_samples=rollout.num_samples,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_response_tokens=rollout.max_response_tokens,
            run_seed=self.config.run.seed,
            prefixes=prefixes,
        )
        self.memory.enter(residency.GENERATE)
        self.source.submit(prompts, plan)
        batch = self.source.collect(len(prompts), timeout_s=rollout.timeout_s, on_sample=on_sample)
        if rollout.record:
            write_record(record_path(self.recorder.paths.records, step), batch)
        return batch

    def learn(self, collected: Collected, step: int) -> tuple[list[Row], dict[str, float]]:
        """Score the samples and update every trained role on them; the rows that trained, and metrics."""
        training = training_rows(collected, self.config.algo)
        if self.config.actor.moe.replay_routing:
            require_routed_experts(training.rows, self.inputs.spec.dims)
        if not training.rows:
            return [], {"filter/skipped_updates": 1.0}
        seed = batch_seed(self.config.run.seed, step)
        rows, metrics = self.scoring.score(
            training.rows, collected.rollout.prompts, self._needed_scores(), seed=seed, step=step
        )
        self.gate.check(rows)
        with self.timers("adv"):
            batch = scored_batch(
                rows,
                training.rewards,
                truncated=[reason is FinishReason.LENGTH for reason in training.finish_reasons],
                step=step,
                seed=seed,
            )
            advantages = self.algorithm.advantages(batch, self.state)
        metrics |= advantages.metrics
        return rows, metrics | self.update(rows, advantages, step)

    def _needed_scores(self) -> frozenset[Score]:
        """What the algorithm asks for. Without old log-probs, one optimizer step takes the current ones for them."""
        needed = self.algorithm.requires()
        if self.counts.optimizer_steps_per_step > 1 or not self.gate.passed:
            needed |= {Score.OLD_LOGPROBS}
        return needed

    def update(self, rows: list[Row], advantages: Advantages, step: int) -> dict[str, float]:
        """Every optimizer step of every trained role that uses the batch; metrics are means over them."""
        attached = with_advantages(rows, advantages)
        metrics = {"critic/frozen": 1.0} if self.has_critic and Role.CRITIC not in self.updaters else {}
        warmup_steps = self.config.critic.warmup_steps
        for role, updater in reversed(self.updaters.items()):
            if role is Role.ACTOR and self.has_critic and not actor_learns(step, critic_warmup_steps=warmup_steps):
                continue
            self.memory.enter(residency.updating(role))
            with self.timers(f"update_{role}"):
                result = update_on_batch(
                    updater,
                    attached,
                    self.state,
                    step=step,
                    mini_batch_prompts=mini_batch_prompts(self.config),
                    num_epochs=self.config.trainer.num_epochs,
                )
            metrics |= result.metrics
            if role is Role.ACTOR:
                before = [row.scores.get(Score.OLD_LOGPROBS, result.before[i]) for i, row in enumerate(rows)]
                metrics |= mismatch_of(rows, before).metrics()
                self.state = self.algorithm.after_step(self.state, {**advantages.metrics, **metrics}, len(rows))
        return metrics

    def _validate(self, step: int, log: MetricsLogger, progress: Progress) -> float | None:
        """Validate if there is data for it; returns the score that `checkpoint.keep_best` compares."""
        if self.inputs.val is None:
            return None
        with self.timers("testing"):
            result = validate(
                self.config,
                self.inputs.val,
                VllmSource(self.engines),
                self.validation_rewards,
                step=step,
                before=partial(self.memory.enter, residency.GENERATE),
            )
        log.log(step, result.metrics | self.timers.pop())
        progress.note(f"step {step}: " + result.summary)
        prefix = f"{self.config.checkpoint.best_metric}/"
        scores = [value for name, value in result.metrics.items() if name.startswith(prefix)]
        return sum(scores) / len(scores) if scores else None

    def _rollout_source(self) -> RolloutSource:
        rollout = self.config.rollout
        if rollout.source == "replay":
            assert rollout.replay_dir is not None
            return ReplaySource(Path(rollout.replay_dir))
        return VllmSource(self.engines)


def with_advantages(rows: Sequence[Row], advantages: Advantages) -> list[Row]:
    """Rows with their advantages, and what else the updates read."""
    named = {"advantages": advantages.values, **advantages.scores}
    host = {name: values.float().numpy() for name, values in named.items()}
    return with_scores(
        rows, {name: [v[i, : row.num_response_tokens] for i, row in enumerate(rows)] for name, v in host.items()}
    )
