"""Run the training loop: sample → judge → rows → forward passes → advantage → update → sync, then log.

The trainer does not know which algorithm runs, nor how models are laid out: it asks the algorithm which quantities it
needs, and the cluster for passes over rows. `megarl.train.wiring` makes its parts.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarl.cluster import offloading
from megarl.cluster.cluster import Cluster
from megarl.cluster.supervisor import EngineSupervisor
from megarl.config.batches import actor_learns, batch_counts, mini_batch_prompts
from megarl.config.schema import TrainerConfig, role_settings
from megarl.config.setting import affected
from megarl.host.activity import doing
from megarl.host.signals import stop_on_signals
from megarl.record.checkpoints import Checkpoint, CheckpointManager, RunState
from megarl.record.metrics import MetricsLogger, Timers
from megarl.record.performance import PerformanceMeter, StepProfiler, token_times
from megarl.record.progress import Progress, ProgressValues
from megarl.record.recorder import DIVERGENCE, TRAINER_LOGPROBS, RunRecorder, batch_metrics
from megarl.rollout.source import SamplingStopped
from megarl.train.canary import Canary
from megarl.train.collect import Collected, Rollouts
from megarl.train.export import export_role
from megarl.train.forward import ForwardStage, needed_quantities, with_advantages
from megarl.train.gate import MismatchGate, engine_metrics, trainer_logprobs
from megarl.train.inputs import TrainInputs
from megarl.train.outcome import FirstSteps, all_failed_error, cut_warning
from megarl.train.passes import BatchUpdate, RoleUpdater
from megarl.train.rows import training_rows
from megarl.train.validate import Validator, has_collapsed
from megarl.train.watch import tells_something
from megarl.types import AlgoState, FinishReason, Row, scored_batch
from megarl.types.messages import LoadRequest, Role, RoleSpec
from megarl.types.seeds import batch_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStage:
    """The stage that updates every trained role on the rows of a step, the critic before the actor.

    roles: all models of the run. enter: called before each role's update, with the `Phase` that says what memory must
    be on the devices for it.
    """

    trainer: TrainerConfig
    updaters: Mapping[Role, RoleUpdater]
    roles: Sequence[RoleSpec] = ()
    has_critic: bool
    critic_warmup_steps: int = 0
    enter: Callable[[offloading.Phase], None]
    timers: Timers

    def num_steps(self, role: Role) -> int:
        """Return how many optimizer steps a role has taken; 0 if it is not trained."""
        return self.updaters[role].num_optimizer_steps if role in self.updaters else 0

    def update(
        self, rows: Sequence[Row], state: AlgoState, *, step: int
    ) -> tuple[dict[str, float], BatchUpdate | None]:
        """Update the trained roles; return the metrics of all of them, and the actor's update.

        The latter is None before step `critic.warmup_steps`, when only the critic is updated.
        """
        metrics = {"critic/frozen": 1.0} if self.has_critic and Role.CRITIC not in self.updaters else {}
        learned = None
        for role, updater in reversed(list(self.updaters.items())):
            is_waiting = self.has_critic and not actor_learns(step, critic_warmup_steps=self.critic_warmup_steps)
            if role is Role.ACTOR and is_waiting:
                continue
            self.enter(updater.updating(self.roles))
            with self.timers(f"update_{role}"):
                result = updater.update_on_batch(
                    rows,
                    state,
                    step=step,
                    mini_batch_prompts=mini_batch_prompts(self.trainer),
                    num_epochs=self.trainer.num_epochs,
                )
            metrics |= result.metrics
            if role is Role.ACTOR:
                learned = result
        return metrics, learned


def _with_outputs(rows: Sequence[Row], computed: Sequence[Row], learned: BatchUpdate | None) -> list[Row]:
    """Return the rows of a step with what the actor found before its update, for the record.

    computed: the rows as they were when the trainer's log-probs were scored, if they were.
    """
    found = {TRAINER_LOGPROBS: trainer_logprobs(computed, {} if learned is None else learned.before)}
    found[DIVERGENCE] = {} if learned is None else dict(learned.divergences)
    return [
        row.with_quantities(**{name: values[i] for name, values in found.items() if i in values})
        for i, row in enumerate(rows)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step: its samples, the rows it trained on (none if the filter left none), and its metrics."""

    collected: Collected
    rows: list[Row]
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The trainer of one run on a cluster. Several trainers may use the same cluster, one after the other.

    memory: moves models between devices and hosts where trainer and engines share the devices. validator: None without
    validation data. state: what the algorithm carries from step to step.
    """

    inputs: TrainInputs
    cluster: Cluster
    recorder: RunRecorder
    memory: offloading.MemoryLedger
    rollouts: Rollouts
    forward: ForwardStage
    gate: MismatchGate
    canary: Canary
    updates: UpdateStage
    supervisor: EngineSupervisor
    validator: Validator | None
    checkpoints: CheckpointManager
    profiler: StepProfiler
    meter: PerformanceMeter
    timers: Timers
    state: AlgoState
    first_steps: FirstSteps

    def fit(self, checkpoint: Checkpoint | None = None) -> None:
        """Train to step `trainer.total_steps` or a collapse, validate, export the trained models; 0 only validate.

        checkpoint: where to continue from; None starts at step 0.

        Raises:
            RunStopped: a signal ended the run early; its checkpoint is complete.
        """
        inputs, config, total = self.inputs, self.inputs.config, self.inputs.config.trainer.total_steps
        self.memory.enter(offloading.LOAD)
        self.cluster.workers.load(LoadRequest.of(config.run, inputs.roles, suspends_nccl=config.placement.suspend_nccl))
        self.memory.add(offloading.built_parts(inputs.roles))
        start = self._restore(checkpoint) if checkpoint else 0

        def is_due(step: int) -> bool:
            return step % config.validation.every_steps == 0 or step == total

        with (
            closing(self.rollouts),
            self.recorder.metrics() as log,
            Progress(total=total, initial=start, description=config.run.name) as progress,
            stop_on_signals() as stop,
        ):
            if config.placement.offload:
                for line in offloading.phase_table(offloading.SYNC.needs, offloading.step_phases(inputs.roles)):
                    progress.note(line)
            self.supervisor.push(start)
            if checkpoint:
                source, goes_on = checkpoint.state.source, self.gate.passed
                self.rollouts.restore(source, checkpoint.path, step=start, goes_on=goes_on)
            # A signal may have kept the validation of the checkpoint's step.
            is_kept = start > 0 and is_due(start) and not self.recorder.paths.validation(start).exists()
            if is_kept or (start == 0 and (config.validation.before_train or total == 0)):
                self.checkpoints.add_score(start, self._validate(start, log, progress))
            # A collection would look at each of the objects of imported modules, at a time that it chooses.
            gc.collect()
            gc.freeze()
            last = start if start and self._has_collapsed(start, progress) else total
            for step in range(start + 1, last + 1):
                with self.profiler.around(step), doing(f"step {step}"):
                    try:
                        with self.timers("step"):
                            result = self.step(step)
                    except SamplingStopped:
                        state = partial(self._run_state, step - 1, None)
                        self.checkpoints.after_step(step - 1, total=total, stop=stop, state=state)
                    self._log(step, result, log, progress)
                score = self._validate(step, log, progress) if is_due(step) else None
                state, is_validated = partial(self._run_state, step, score), score is not None
                last = step if score == 0 and self._has_collapsed(step, progress) else total
                with self.timers("save_checkpoint"):  # logged with the next step
                    self.checkpoints.after_step(step, total=last, stop=stop, state=state, is_validated=is_validated)
                if step == last:
                    break
        paths = {Role.ACTOR: self.recorder.paths.export, Role.CRITIC: self.recorder.paths.export_critic}
        for role in (role for role in inputs.roles if role.trainable and total):
            self.memory.enter(offloading.exporting(role.role, role.memory))
            self.recorder.require_owned()
            export_role(self.cluster.workers, role, paths[role.role])
        self.supervisor.close()

    def step(self, step: int) -> StepResult:
        """Run one step, from prompts to engines that generate with the new weights: admit → take → learn → push."""
        inputs, config = self.inputs, self.inputs.config
        seed = batch_seed(config.run.seed, step)
        replayed = inputs.spec.dims if config.actor.moe.replay_routing else None
        self.canary.ask(step - 1)
        self.rollouts.admit(version=step - 1)
        collected = self.rollouts.take(step)
        self.canary.prime(step, collected.rollout.prompts.values())
        if self.first_steps.nothing_heard(collected.outcome):
            self.recorder.problems(step, collected.troubles)
            outcome, more = collected.outcome, " (RUN/reward_problems.jsonl has more of them)"
            raise all_failed_error(f"step {step}", outcome.num_samples, outcome.failures, more)
        stale_at = step if config.rollout.schedule.staleness else None
        training = training_rows(collected, config.algo, stale_at=stale_at, replayed=replayed)
        rows, metrics = training.rows, {"filter/skipped_updates": 1.0}
        if rows:
            needed = needed_quantities(
                inputs.algorithm,
                config.algo,
                staleness=config.rollout.schedule.staleness,
                num_updates=batch_counts(config).optimizer_steps_per_step,
                gate_passed=self.gate.passed,
            )
            rows, metrics = self.forward.add_quantities(rows, collected.rollout.prompts, needed, seed=seed, step=step)
            self.gate.check(rows)
            metrics |= self.canary.check(step - 1, step)
            with self.timers("adv"):
                truncated = [reason is FinishReason.LENGTH for reason in training.finish_reasons]
                batch = scored_batch(rows, training.rewards, truncated=truncated, step=step, seed=seed)
                advantages = inputs.algorithm.advantages(batch, self.state)
            computed, rows = rows, with_advantages(rows, advantages)
            self.supervisor.outdate()
            updated, learned = self.updates.update(rows, self.state, step=step)
            if learned is not None:
                updated |= engine_metrics(computed, learned.before, config.algo.correction)
            rows = _with_outputs(rows, computed, learned)
            metrics |= {**advantages.metrics, **updated}
            self.state = inputs.algorithm.after_step(self.state, metrics, len(rows))
        self.rollouts.settle()
        with self.timers("sync"):
            metrics |= self.supervisor.push(step)
        self.rollouts.scheduler.release()
        return StepResult(collected=collected, rows=rows, metrics=metrics)

    def _log(self, step: int, result: StepResult, log: MetricsLogger, progress: Progress) -> None:
        """Record the metrics and some samples of a step."""
        metrics = {**result.metrics, **result.collected.metrics, **self.memory.metrics(), **self.supervisor.metrics()}
        metrics |= self.recorder.timeline(step, self.timers.stages(), self.supervisor.busy)
        collected, rows, times = result.collected, result.rows, self.timers.pop()
        metrics |= times
        if rows:
            metrics |= batch_metrics(collected.rollout) | token_times(times, rows)
        if (update_s := times.get("timing_s/update_actor")) is not None:
            metrics |= self.meter.metrics(rows, update_s)
        log.log(step, metrics | self.cluster.metrics(step))
        self.recorder.problems(step, collected.troubles)
        self.recorder.sample_rollouts(step, collected.rollout, collected.rewards, rows, self.inputs.tokenizer)
        config = self.inputs.config
        is_judged = config.rewards.manager != "none"
        progress.update(step, ProgressValues.of(metrics, is_judged=is_judged))
        has_teacher = config.algo.distill.teacher != "none"
        has_advantage = any(metrics.get(f"critic/advantages/{end}", 0) for end in ("max", "min"))
        for warning in self.first_steps.warnings(
            step,
            collected.outcome,
            teaches=has_advantage or tells_something(metrics, config.model.dtype) or not (is_judged or has_teacher),
            is_judged=is_judged,
            read=lambda sample: self.rollouts.rewards.decode(sample.last_turn_ids.tolist()),
            of_cut=lambda frac: cut_warning(
                frac, config.rollout.max_response_tokens, self.inputs.answers.stop_tokens.names
            ),
        ):
            progress.note(warning)

    def _validate(self, step: int, log: MetricsLogger, progress: Progress) -> float | None:
        """Validate if there is data for it, and return the score that `checkpoint.keep_best` compares.

        After a signal a checkpoint is due at once, so the resumed run does it, and there is no score.
        """
        if self.validator is None:
            return None
        try:
            with self.timers("testing"):
                result = self.validator.validate(step)
        except SamplingStopped:
            return None
        self.recorder.problems(step, result.troubles, phase="validation")
        self.recorder.timeline(step, self.timers.stages(), {})
        log.log(step, {**result.metrics} | self.timers.pop())
        progress.note(f"step {step}: {result.summary}")
        return result.score

    def _has_collapsed(self, step: int, progress: Progress) -> bool:
        config, count = self.inputs.config, self.inputs.config.validation.stop_after_zeros
        if found := has_collapsed(self.recorder.paths.metrics, config.checkpoint.best_metric, count):
            progress.note(
                f"step {step}: the policy has collapsed (validations in a row of 0: {count}); the run ends here"
            )
        return found

    def _restore(self, checkpoint: Checkpoint) -> int:
        """Restore everything from a checkpoint, and return its step."""
        state, config = checkpoint.state, self.inputs.config
        self.cluster.workers.load_checkpoint(checkpoint.path, same_layout=checkpoint.same_layout(role_settings(config)))
        self.rollouts.queue.load_state_dict(state.sampler)
        self.state = state.algo
        self.first_steps = FirstSteps(total_steps=0, num_flat=None, is_heard=True)
        for role, count in ((Role.ACTOR, state.num_optimizer_steps), (Role.CRITIC, state.num_critic_steps)):
            if role in self.updates.updaters:
                self.updates.updaters[role].num_optimizer_steps = count
        # A run that samples or syncs in another way than before has to pass the gate again.
        self.gate.passed = state.gate_passed and not affected(state.config, config, "engines")
        return state.step

    def _run_state(self, step: int, score: float | None, directory: Path) -> RunState:
        """Return the driver's state for the checkpoint of this step, which is about to be written."""
        self.memory.enter(offloading.checkpointing(self.inputs.roles))
        return RunState(
            command="train",
            step=step,
            num_optimizer_steps=self.updates.num_steps(Role.ACTOR),
            num_critic_steps=self.updates.num_steps(Role.CRITIC),
            gate_passed=self.gate.passed,
            sampler=self.rollouts.queue.state_dict(),
            algo=self.state,
            source=self.rollouts.save(directory),
            score=score,
            config=self.inputs.config,
            inputs=self.recorder.inputs.to_json(),
        )
