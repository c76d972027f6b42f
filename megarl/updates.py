"""Optimizer steps over a batch of rows: mini-batches, micro-batch plans, denominators, learning rate."""

from collections.abc import Sequence
from dataclasses import replace

from megarl.cluster import WorkerGroup
from megarl.config.schema import ActorConfig
from megarl.data.packing import plan_micro_batches
from megarl.parallel.messages import Role, UpdateRequest, UpdateResult
from megarl.parallel.schedule import learning_rate
from megarl.types import Algorithm, AlgoState, FloatArray, Row


class PolicyUpdater:
    """Drives the workers' scoring passes and optimizer steps for one algorithm."""

    def __init__(
        self,
        workers: WorkerGroup,
        actor: ActorConfig,
        algorithm: Algorithm,
        *,
        total_steps: int,
        temperature: float = 1.0,
    ) -> None:
        self._workers, self._actor, self._algorithm = workers, actor, algorithm
        self._total_steps, self._temperature = total_steps, temperature
        self.num_optimizer_steps = 0

    def score(self, role: Role, rows: Sequence[Row], *, step: int) -> list[FloatArray]:
        """Log-probs of all rows in order, at the training temperature."""
        return self._workers.score(role, rows, self._plan(rows), temperature=self._temperature, step=step)

    def update(self, rows: Sequence[Row], state: AlgoState, *, step: int) -> UpdateResult:
        """One optimizer step on these rows; its log-probs are those before the step, in row order."""
        request = UpdateRequest(
            step=step,
            objective=self._algorithm,
            state=state,
            denominators=self._algorithm.denominators(rows),
            temperature=self._temperature,
            lr=learning_rate(self._actor.optimizer, self.num_optimizer_steps, self._total_steps),
        )
        self.num_optimizer_steps += 1
        result = self._workers.update(rows, self._plan(rows), request)
        return replace(result, before={i: result.before[i] for i in range(len(rows))})

    def _plan(self, rows: Sequence[Row]) -> list[list[list[int]]]:
        layout = self._actor.layout
        return plan_micro_batches(
            [row.num_tokens for row in rows],
            layout.dp,
            self._actor.micro_batch_tokens,
            # Interleaved pipelines take micro-batches in groups of pp.
            multiple=layout.pp if layout.virtual_pp > 1 else 1,
        )
