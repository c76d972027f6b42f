"""The loop: prompts → rollout → reward → score → advantage → update → sync → log.

The trainer does not know which algorithm runs, nor how models are laid out: it asks the algorithm which scores it
needs, and the cluster for passes over rows.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from megarl import memory
from megarl.algos.mismatch import MismatchSums, mismatch_sums
from megarl.checkpoint import Checkpoint, CheckpointManager, RunState
from megarl.cluster import Cluster
from megarl.data.chat import response_decoder
from megarl.errors import MismatchError
from megarl.export import export_model, weight_specs
from megarl.inputs import TrainInputs, open_sampler
from megarl.metrics import MetricsLogger, Timers
from megarl.observe import RunRecorder, batch_metrics, resident_memory
from megarl.parallel.messages import LoadRequest, Role
from megarl.performance import PerformanceMeter
from megarl.profiling import StepProfiler
from megarl.progress import Progress, ProgressValues
from megarl.rewards.manager import RewardManager
from megarl.roles import roles_of
from megarl.rollout.replay import ReplaySource, record_path, write_record
from megarl.rollout.source import RolloutSource, SamplingPlan
from megarl.rollout.vllm_source import VllmSource
from megarl.rollout.weight_sync import WeightSync
from megarl.signals import stop_on_signals
from megarl.types import FloatArray, Prompt, RolloutBatch, Row, Score, pad_rows, row_from_sample, scored_batch
from megarl.updates import PolicyUpdater
from megarl.validation import validate

# Mean |Δ log-prob| between engine and trainer above which training would optimise a different policy.
MISMATCH_GATE_NATS = {"float32": 1e-4, "bfloat16": 0.05}


class Trainer:
    """One run on a cluster. Several trainers may use the same cluster one after the other."""

    def __init__(self, inputs: TrainInputs, cluster: Cluster, recorder: RunRecorder) -> None:
        config = inputs.config
        cluster.check_serves(config)
        self.inputs, self.config, self.cluster, self.recorder = inputs, config, cluster, recorder
        self.algorithm, self.state = inputs.algorithm, inputs.algorithm.initial_state()
        self.sampler = open_sampler(config, inputs.train)
        self.rewards = RewardManager(response_decoder(inputs.tokenizer))
        self.timers = Timers()
        self.roles = roles_of(config, self.algorithm)
        self.memory = memory.MemoryLedger(cluster.workers, cluster.engines, enabled=config.placement.offload)
        self.meter = PerformanceMeter(config, inputs.spec.dims)
        self.profiler = StepProfiler(cluster.workers, config.logging.profile_steps, recorder.paths.profile)
        self.checkpoints = CheckpointManager(recorder.paths.checkpoints, config.checkpoint, cluster.workers)
        self.source = self._rollout_source()
        self.updater = PolicyUpdater(
            cluster.workers,
            config.actor,
            self.algorithm,
            total_steps=config.trainer.total_steps * self.optimizer_steps_per_batch,
            temperature=config.rollout.temperature,
        )

    @property
    def optimizer_steps_per_batch(self) -> int:
        trainer = self.config.trainer
        mini = trainer.mini_batch_prompts or trainer.prompts_per_step
        return trainer.num_epochs * (trainer.prompts_per_step // mini)

    def fit(self, checkpoint: Checkpoint | None = None) -> None:
        """Train up to step `trainer.total_steps`, from a checkpoint if there is one; validate, export the result.

        Raises:
            RunStopped: a signal ended the run early; its checkpoint is complete.
        """
        config, total = self.config, self.config.trainer.total_steps
        self.memory.enter(memory.LOAD)
        self.cluster.workers.load(
            LoadRequest(roles=self.roles, seed=config.run.seed, deterministic=config.run.deterministic)
        )
        self.memory.add(memory.built_parts(self.roles))
        path = self.cluster.scope.shm_file("weights")
        self.sync = WeightSync(
            self.cluster.workers,
            self.cluster.engines,
            path,
            weight_specs(self.inputs.spec, config.model.dtype),
            transport=self.cluster.weight_transport(path),
        )
        start = self._restore(checkpoint) if checkpoint else 0
        with (
            self.recorder.metrics() as log,
            Progress(total=total, initial=start, description=config.run.name) as progress,
            stop_on_signals() as stop,
        ):
            if config.placement.offload:
                progress.note(memory.phase_table(memory.SYNC.needs, memory.step_phases(self.roles)))
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
        self.memory.enter(memory.EXPORT)
        export_model(self.cluster.workers, self.inputs.spec, config.model.dtype, self.recorder.paths.export)
        self.sync.close()

    def _push(self, version: int) -> None:
        self.memory.enter(memory.SYNC)
        self.sync.push(version, verify=self.config.sync.verify)

    def _restore(self, checkpoint: Checkpoint) -> int:
        """Continue where a checkpoint was taken; returns its step."""
        state = checkpoint.state
        self.cluster.workers.load_checkpoint(checkpoint.path, same_layout=checkpoint.has_layout_of(self.config))
        self.sampler.load_state_dict(state.sampler)
        self.source.load_state_dict(dict(state.source))
        self.state, self.updater.num_optimizer_steps = state.algo, state.num_optimizer_steps
        return state.step

    def _run_state(self, step: int, score: float | None) -> RunState:
        """Asked for when a checkpoint is about to be written."""
        self.memory.enter(memory.checkpointing(self.roles))
        return RunState(
            command="train",
            step=step,
            num_optimizer_steps=self.updater.num_optimizer_steps,
            sampler=self.sampler.state_dict(),
            algo=self.state,
            source=self.source.state_dict(),
            score=score,
            config=self.config,
        )

    def _train_step(self, step: int, log: MetricsLogger, progress: Progress) -> None:
        with self.timers("step"):
            with self.timers("gen"):
                rollout = self.generate(self.next_prompts(), step)
            with self.timers("reward"):
                rewards = self.rewards.score(rollout)
            rows = self.score([row_from_sample(s) for s in rollout.samples], step)
            with self.timers("adv"):
                advantages = self.algorithm.advantages(scored_batch(rows, rewards), self.state)
            rows = _with_advantages(rows, advantages.values)
            with self.timers("update_actor"):
                metrics, mismatch = self.update(rows, step, advantages.metrics)
            with self.timers("sync"):
                self._push(step)
        times = self.timers.pop()
        metrics |= mismatch.metrics() | batch_metrics(rollout) | times | self.memory.metrics()
        metrics["perf/tokens_per_s"] = sum(r.num_tokens for r in rows) / times["timing_s/step"]
        metrics |= self.meter.metrics(rows, times["timing_s/update_actor"])
        log.log(step, metrics | resident_memory(self.cluster.pids))
        self.recorder.sample_rollouts(step, rollout, rewards, self.inputs.tokenizer)
        progress.update(
            step,
            ProgressValues(
                reward=metrics["critic/score/mean"],
                response_length=metrics["response_length/mean"],
                mismatch=metrics["mismatch/abs_mean"],
                tokens_per_s=metrics["perf/tokens_per_s"],
            ),
        )

    def next_prompts(self) -> list[Prompt]:
        """The next batch in the seeded order."""
        return [self.inputs.train[i] for i in self.sampler.next_batch()]

    def generate(self, prompts: Sequence[Prompt], step: int) -> RolloutBatch:
        """Sample a group for every prompt, and record the rollout if asked to."""
        rollout = self.config.rollout
        plan = SamplingPlan(
            step=step,
            num_samples=rollout.num_samples,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_response_tokens=rollout.max_response_tokens,
            run_seed=self.config.run.seed,
        )
        self.memory.enter(memory.GENERATE)
        self.source.submit(prompts, plan)
        batch = self.source.collect(len(prompts), timeout_s=rollout.timeout_s)
        if rollout.record:
            write_record(record_path(self.recorder.paths.records, step), batch)
        return batch

    def score(self, rows: list[Row], step: int) -> list[Row]:
        """The scoring passes this step needs. The first step's old log-probs are computed for the gate."""
        required = self.algorithm.requires()
        if Score.REF_LOGPROBS in required:
            self.memory.enter(memory.scoring(Role.REFERENCE))
            with self.timers("ref"):
                rows = _with(rows, ref_logprobs=self.updater.score(Role.REFERENCE, rows, step=step))
        if Score.OLD_LOGPROBS in required or self.optimizer_steps_per_batch > 1 or step == 1:
            self.memory.enter(memory.scoring(Role.ACTOR))
            with self.timers("old_log_prob"):
                rows = _with(rows, old_logprobs=self.updater.score(Role.ACTOR, rows, step=step))
        if step == 1:
            self._gate(_mismatch(rows, [r.scores["old_logprobs"] for r in rows]))
        return rows

    def update(
        self, rows: list[Row], step: int, advantage_metrics: Mapping[str, float]
    ) -> tuple[dict[str, float], MismatchSums]:
        """Every optimizer step that uses the batch; metrics are means over them."""
        self.memory.enter(memory.updating(Role.ACTOR))
        uids = list(dict.fromkeys(row.uid for row in rows))
        size = self.config.trainer.mini_batch_prompts or len(uids)
        sums: dict[str, float] = {}
        mismatch = MismatchSums()
        for epoch in range(self.config.trainer.num_epochs):
            for start in range(0, len(uids), size):
                members = set(uids[start : start + size])
                mini_batch = [row for row in rows if row.uid in members]
                result = self.updater.update(mini_batch, self.state, step=step)
                for name, value in result.metrics.items():
                    sums[name] = sums.get(name, 0.0) + value
                if epoch == 0:
                    before = [r.scores.get("old_logprobs", result.before[i]) for i, r in enumerate(mini_batch)]
                    mismatch = mismatch.merged(_mismatch(mini_batch, before))
        metrics = {name: value / self.optimizer_steps_per_batch for name, value in sums.items()}
        metrics |= advantage_metrics
        self.state = self.algorithm.after_step(self.state, metrics, len(rows))
        return metrics, mismatch

    def _gate(self, mismatch: MismatchSums) -> None:
        measured = mismatch.metrics()["mismatch/abs_mean"]
        limit = self.config.trainer.mismatch_gate_nats or MISMATCH_GATE_NATS[self.config.model.dtype]
        if not measured <= limit:
            raise MismatchError(
                f"the engine's log-probs differ from the trainer's by {measured:.2e} nats on average before the first "
                f"update, the limit is {limit:.0e} (trainer.mismatch_gate_nats); check that both use the same "
                f"weights, dtype and temperature (sync.verify=true compares every tensor)"
            )

    def _validate(self, step: int, log: MetricsLogger, progress: Progress) -> float | None:
        """Validate if there is data for it; returns the score that `checkpoint.keep_best` compares."""
        if self.inputs.val is None:
            return None
        self.memory.enter(memory.GENERATE)
        with self.timers("testing"):
            result = validate(self.config, self.inputs.val, VllmSource(self.cluster.engines), self.rewards, step=step)
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
        return VllmSource(self.cluster.engines)


def _with(rows: Sequence[Row], **scores: Sequence[FloatArray]) -> list[Row]:
    return [row.with_scores(**{name: values[i] for name, values in scores.items()}) for i, row in enumerate(rows)]


def _with_advantages(rows: Sequence[Row], values: torch.Tensor) -> list[Row]:
    host = values.float().numpy()
    return [row.with_scores(advantages=host[i, : row.num_response_tokens]) for i, row in enumerate(rows)]


def _mismatch(rows: Sequence[Row], logprobs: Sequence[FloatArray]) -> MismatchSums:
    return mismatch_sums(
        pad_rows([row.scores["rollout_logprobs"] for row in rows], dtype=torch.float32),
        pad_rows(logprobs, dtype=torch.float32),
        pad_rows([row.loss_mask for row in rows], dtype=torch.bool),
    )
