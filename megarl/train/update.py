"""Scoring passes and optimizer steps of a role: micro-batch plans, denominators, learning rate."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megarl.data.packing import plan_micro_batches
from megarl.parallel.schedule import learning_rate
from megarl.types import AlgoState, Denominators, FloatArray, Objective, Row
from megarl.types.messages import Role, RoleSpec, UpdateRequest, UpdateResult


class CountedObjective(Objective[Any], Protocol):
    """An objective that knows what its sums are divided by: an `Algorithm`, or a critic's `ValueLoss`."""

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Global counts of an optimizer mini-batch."""


class Workers(Protocol):
    """The ranks' side; `plan[dp][micro_batch]` lists rows."""

    def score(
        self,
        role: Role,
        rows: Sequence[Row],
        plan: Sequence[Sequence[Sequence[int]]],
        *,
        temperature: float,
        step: int,
        paired: bool = False,
    ) -> dict[str, list[FloatArray]]: ...

    def update(
        self, rows: Sequence[Row], plan: Sequence[Sequence[Sequence[int]]], request: UpdateRequest
    ) -> UpdateResult: ...


class RoleScorer:
    """Scoring passes of a role, trained or frozen, in micro-batches for its layout."""

    def __init__(self, workers: Workers, role: RoleSpec, *, temperature: float = 1.0) -> None:
        self._workers, self._role, self._temperature = workers, role, temperature

    def score(self, rows: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        """All that the role says of the rows in one pass, by name, in row order: `WorkerGroup.score`.

        Log-probs and entropies are those at the training temperature.
        """
        plan = self._plan([row.num_tokens for row in rows])
        return self._score(rows, plan, step=step)

    def score_pairs(self, rows: Sequence[Row], others: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        """`score` of `rows` and then `others`, which are the same rows with other prompts, in one pass; and `kl`:
        KL(policy on `others` ‖ policy on `rows`) over the vocabulary, per response token, of `rows`.

        A pair shares a micro-batch.
        """
        both = [*rows, *others]
        found = self._score(both, self._plan_pairs(both), step=step, paired=True)
        return {**found, "kl": found["kl"][: len(rows)]}

    def _score(
        self, rows: Sequence[Row], plan: list[list[list[int]]], *, step: int, paired: bool = False
    ) -> dict[str, list[FloatArray]]:
        # Scores of earlier passes stay with the driver.
        bare = self._sent(rows, frozenset())
        return self._workers.score(self._role.role, bare, plan, temperature=self._temperature, step=step, paired=paired)

    def _sent(self, rows: Sequence[Row], names: Collection[str]) -> list[Row]:
        """Rows with no more than a pass of this role reads."""
        return [row.only(names, routed_experts=self._role.replays_routing) for row in rows]

    def _plan_pairs(self, rows: Sequence[Row]) -> list[list[list[int]]]:
        """Micro-batches of rows of the first half, followed in the same order by their like in the second."""
        count = len(rows) // 2
        plan = self._plan([a.num_tokens + b.num_tokens for a, b in zip(rows[:count], rows[count:], strict=True)])
        return [[[*indices, *(count + i for i in indices)] for indices in batches] for batches in plan]

    def _plan(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        layout = self._role.layout
        return plan_micro_batches(
            lengths,
            layout.dp,
            self._role.settings.micro_batch_tokens,
            # Interleaved pipelines take micro-batches in groups of pp.
            multiple=layout.pp if layout.virtual_pp > 1 else 1,
        )


class RoleUpdater(RoleScorer):
    """Scoring passes and optimizer steps of a trained role; `total_steps` optimizer steps are its schedule's length."""

    def __init__(
        self,
        workers: Workers,
        role: RoleSpec,
        objective: CountedObjective,
        *,
        total_steps: int,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(workers, role, temperature=temperature)
        self._objective, self._total_steps = objective, total_steps
        self.num_optimizer_steps = 0

    def update(self, rows: Sequence[Row], state: AlgoState, *, step: int, paired: bool = False) -> UpdateResult:
        """One optimizer step on these rows; its `before` is in row order.

        paired: row i and row i of the second half share a micro-batch, of which they have the same places.
        """
        optimizer = self._role.settings.optimizer
        request = UpdateRequest(
            role=self._role.role,
            step=step,
            objective=self._objective,
            state=state,
            denominators=self._objective.denominators(rows),
            temperature=self._temperature,
            lr=learning_rate(optimizer, self.num_optimizer_steps, self._total_steps),
        )
        self.num_optimizer_steps += 1
        needed = self._sent(rows, self._objective.reads)
        plan = self._plan_pairs(rows) if paired else self._plan([row.num_tokens for row in rows])
        result = self._workers.update(needed, plan, request)
        return replace(result, before={i: result.before[i] for i in range(len(rows))})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUpdate:
    """Means of metrics over the optimizer steps of a batch, and what the role said of the rows before them."""

    metrics: Mapping[str, float]
    before: Sequence[FloatArray]


def update_on_batch(
    updater: RoleUpdater,
    rows: Sequence[Row],
    state: AlgoState,
    *,
    step: int,
    mini_batch_prompts: int,
    num_epochs: int,
) -> BatchUpdate:
    """Every optimizer step that uses a batch: `num_epochs` times each mini-batch of `mini_batch_prompts` groups.

    `before` is of each row's first mini-batch, so that of later mini-batches saw the steps on the earlier ones.
    """
    uids = list(dict.fromkeys(row.uid for row in rows))
    sums: dict[str, float] = {}
    before: dict[int, FloatArray] = {}
    num_steps = 0
    for _ in range(num_epochs):
        for start in range(0, len(uids), mini_batch_prompts):
            members = set(uids[start : start + mini_batch_prompts])
            indices = [i for i, row in enumerate(rows) if row.uid in members]
            result = updater.update([rows[i] for i in indices], state, step=step)
            num_steps += 1
            for name, value in result.metrics.items():
                sums[name] = sums.get(name, 0.0) + value
            for place, i in enumerate(indices):
                before.setdefault(i, result.before[place])
    return BatchUpdate(
        metrics={name: value / num_steps for name, value in sums.items()},
        before=[before[i] for i in range(len(rows))],
    )
