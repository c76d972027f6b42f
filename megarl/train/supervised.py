"""The loop of runs without rollouts: batches of a fixed data set, an optimizer step each, checkpoints, export."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megarl.config.schema import Config
from megarl.data.sampler import PromptSampler
from megarl.host.signals import stop_on_signals
from megarl.record.metrics import MetricsLogger, Timers
from megarl.record.progress import Progress, ProgressValues
from megarl.record.recorder import RunRecorder, resident_memory
from megarl.train.checkpoint import Checkpoint, CheckpointManager, Command, RunState
from megarl.train.export import export_model
from megarl.train.update import CountedObjective, RoleUpdater
from megarl.train.validate import Validation
from megarl.types import AlgoState, Row
from megarl.types.messages import LoadRequest, RoleSpec

if TYPE_CHECKING:
    from megarl.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedTask:
    """What such a run trains, and on what.

    rows: those of the examples with these indices. paired: the second half of them are the others of pairs; see
    `RoleUpdater.update`. validate: asked before the first step, every `validate_every` steps and after the last.
    """

    command: Command
    role: RoleSpec
    objective: CountedObjective
    total_steps: int
    batch_size: int
    num_examples: int
    rows: Callable[[Sequence[int]], list[Row]]
    paired: bool = False
    validate: Callable[[RoleUpdater, int], Validation] | None = None
    validate_every: int = 1

    def validates_after(self, step: int) -> bool:
        return self.validate is not None and (step % self.validate_every == 0 or step == self.total_steps)


class SupervisedTrainer:
    """One run on a cluster."""

    def __init__(self, task: SupervisedTask, config: Config, cluster: "Cluster", recorder: RunRecorder) -> None:
        self.task, self.config, self.cluster, self.recorder = task, config, cluster, recorder
        self.state, self.timers = AlgoState(), Timers()
        self.updater = RoleUpdater(cluster.workers, task.role, task.objective, total_steps=task.total_steps)
        self.sampler = PromptSampler(task.num_examples, task.batch_size, config.run.seed, config.data.shuffle)
        self.checkpoints = CheckpointManager(recorder.paths.checkpoints, config.checkpoint, cluster.workers)

    def fit(self, checkpoint: Checkpoint | None = None) -> None:
        """Train up to the last step, from a checkpoint if there is one, then export.

        Raises:
            RunStopped: a signal ended the run early; its checkpoint is complete.
        """
        task, run = self.task, self.config.run
        self.cluster.workers.load(LoadRequest(roles=(task.role,), seed=run.seed, deterministic=run.deterministic))
        start = self._restore(checkpoint) if checkpoint else 0
        with (
            self.recorder.metrics() as log,
            Progress(total=task.total_steps, initial=start, description=run.name) as progress,
            stop_on_signals() as stop,
        ):
            if start == 0:
                self._validate(0, log, progress)
            for step in range(start + 1, task.total_steps + 1):
                self._train_step(step, log, progress)
                score = self._validate(step, log, progress)
                state = partial(self._run_state, step, score)
                self.checkpoints.after_step(step, total=task.total_steps, stop=stop, state=state)
        export_model(self.cluster.workers, task.role, self.recorder.paths.export)

    def _restore(self, checkpoint: Checkpoint) -> int:
        """Continue where a checkpoint was taken; returns its step."""
        self.cluster.workers.load_checkpoint(checkpoint.path, same_layout=checkpoint.same_layout(self.config))
        self.sampler.load_state_dict(checkpoint.state.sampler)
        self.updater.num_optimizer_steps = checkpoint.state.num_optimizer_steps
        return checkpoint.state.step

    def _run_state(self, step: int, score: float | None) -> RunState:
        return RunState(
            command=self.task.command,
            step=step,
            num_optimizer_steps=self.updater.num_optimizer_steps,
            sampler=self.sampler.state_dict(),
            algo=self.state,
            source={},
            score=score,
            config=self.config,
        )

    def _train_step(self, step: int, log: MetricsLogger, progress: Progress) -> None:
        role = self.task.role.role
        rows = self.task.rows(self.sampler.next_batch())
        with self.timers("step"), self.timers(f"update_{role}"):
            result = self.updater.update(rows, self.state, step=step, paired=self.task.paired)
        times = self.timers.pop()
        tokens_per_s = sum(row.num_tokens for row in rows) / times["timing_s/step"]
        metrics = {**result.metrics} | times | {"perf/tokens_per_s": tokens_per_s}
        log.log(step, metrics | resident_memory(self.cluster.pids))
        progress.update(
            step,
            ProgressValues(
                loss=metrics[f"{role}/loss"],
                accuracy=metrics.get(f"{role}/accuracy"),
                tokens_per_s=tokens_per_s,
            ),
        )

    def _validate(self, step: int, log: MetricsLogger, progress: Progress) -> float | None:
        """Validate if it is due; returns the score."""
        if self.task.validate is None or not self.task.validates_after(step):
            return None
        with self.timers("testing"):
            result = self.task.validate(self.updater, step)
        log.log(step, {**result.metrics} | self.timers.pop())
        progress.note(f"step {step}: {result.summary}")
        return result.score
