"""Run passes over rows through a role's model: forward passes, and optimizer steps if the role is trained."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megarl.algos.batch_statistics import optimizer_batches
from megarl.cluster import offloading
from megarl.config.optimizer import learning_rate
from megarl.data.packing import imbalance_metrics, plan_micro_batches
from megarl.parallel.backend import shares_prefixes
from megarl.record.performance import forward_flops, image_flops
from megarl.train.watch import WeightWatch
from megarl.types import PAIRS, AlgoState, Denominators, FloatArray, Objective, Row, TokenQuantity
from megarl.types.messages import (
    AccumulateRequest,
    ForwardRequest,
    Head,
    MicroBatchPlan,
    Role,
    RoleSpec,
    StepRequest,
    Teaching,
    UpdateRequest,
    UpdateResult,
)
from megarl.types.prefixes import count_shared, counted_once, family_order, num_passed
from megarl.types.rows import LAG, lags_of
from megarl.weights.dims import Dims
from megarl.weights.families import read_model_spec

if TYPE_CHECKING:
    from megarl.cluster.workers import RoleWorkers


RequestT = TypeVar("RequestT", bound=AccumulateRequest)


class CountedObjective(Objective[Any], Protocol):
    """An objective that knows the counts that divide its sums: an `Algorithm`, or a critic's `ValueLoss`."""

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Return the global counts of an optimizer mini-batch."""


class Passes(Protocol):
    """Forward passes over rows, by a model of the run or by one that others serve."""

    @property
    def phase(self) -> offloading.Phase:
        """Return the phase in which the model computes outputs."""

    @property
    def room(self) -> int:
        """Return the number of tokens of the longest row that it takes."""

    def forward(self, rows: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        """Compute the model's outputs for the rows, by name, in row order."""


class RolePasses:
    """The forward passes of a role, trained or frozen, over rows in micro-batches that suit its layout.

    Rows are split so that data-parallel ranks get nearly equal FLOPs of a model with these `dims` (None: equal tokens).
    """

    def __init__(
        self,
        workers: "RoleWorkers",
        role: RoleSpec,
        *,
        temperature: float = 1.0,
        dims: Dims | None = None,
        top_k: int | None = None,
        common: int | None = None,
        squares: bool = False,
    ) -> None:
        """Make the passes of a role. top_k, common, squares: as in `ForwardRequest`."""
        self._workers, self._role, self._temperature, self._dims = workers, role, temperature, dims
        reads_images = dims is not None and role.tower is not None
        self._tower = read_model_spec(role.model.path, tower=role.tower).tower if reads_images else None
        self._top_k, self._common, self._squares = top_k, common, squares

    @property
    def spec(self) -> RoleSpec:
        return self._role

    @property
    def phase(self) -> offloading.Phase:
        """Return the phase in which this role's model computes outputs."""
        return offloading.forward(self._role.role, self._role.memory)

    def updating(self, roles: Sequence[RoleSpec]) -> offloading.Phase:
        """Return the phase in which this role is trained. roles: those of the run, some of which compute in it, too."""
        return offloading.updating(self._role.role, self._role.memory, roles)

    @property
    def room(self) -> int:
        """Return the number of tokens that a micro-batch holds, and so of the longest row."""
        return self._role.settings.micro_batch_tokens

    def forward(self, rows: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        """Compute all outputs that the role's model has for the rows (such as log-probs) in one pass, by name, in row
        order.

        Log-probs and entropies are those at the training temperature.
        """
        return self._forward(rows, step, paired=False)

    def forward_pairs(self, rows: Sequence[Row], others: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        """Compute outputs of rows and of `others` (the same responses after other prompts) in one pass, and the KL
        between both.

        Returns the outputs of `rows` followed by `others`, and `kl`: KL(policy on `others` ‖ policy on `rows`) over the
        vocabulary, per response token, of `rows`. A pair shares a micro-batch.
        """
        found = self._forward([*rows, *others], step, paired=True)
        return {**found, "kl": found["kl"][: len(rows)]}

    def _forward(self, rows: Sequence[Row], step: int, *, paired: bool) -> dict[str, list[FloatArray]]:
        request = ForwardRequest(
            role=self._role.role,
            temperature=self._temperature,
            step=step,
            paired=paired,
            top_k=self._top_k,
            common=self._common,
            squares=self._squares,
        )
        # Do not send the quantities of earlier passes along.
        sent = self._sent(rows, frozenset())
        return self._workers.forward(sent, self._plan(sent, paired=paired)[0], request)

    def _sent(
        self, rows: Sequence[Row], names: Collection[str], *, likely: bool = False, hinted: bool = False
    ) -> list[Row]:
        """Remove from rows the quantities that a pass of this role does not read, before they are sent to ranks."""
        role = self._role
        with_nucleus = role.head is Head.LM
        experts = role.replays_routing
        return [
            row.only(names, routed_experts=experts, nucleus=with_nucleus, likely=likely, hinted_prompt=hinted)
            for row in rows
        ]

    def _plan(self, rows: Sequence[Row], *, paired: bool) -> tuple[MicroBatchPlan, dict[str, float]]:
        """Plan the rows' micro-batches, and return metrics of how evenly they load the ranks.

        Rows that may share a prefix come one after the other, so that few ranks and micro-batches repeat it.

        paired: each micro-batch holds rows of the first half, followed in the same order by their counterparts in the
        second.
        """
        layout, half = self._role.layout, len(rows) // 2
        halves = [rows[:half], rows[half:]] if paired else [rows]
        shared, savings, order = None, None, list(range(len(halves[0])))
        shares = self._dims is not None and shares_prefixes(self._role.settings)
        if shares:
            order = family_order(halves[0])
            common = [[0, *(count_shared(each[a], each[b]) for a, b in itertools.pairwise(order))] for each in halves]
            shared = [sum(counts) for counts in zip(*common, strict=True)]
            savings = [sum(self._cost(n, 0) for n in counts if n) for counts in zip(*common, strict=True)]
            for each in halves if self._tower is not None else ():
                for place, (a, b) in enumerate(itertools.pairwise(order), 1):
                    savings[place] += image_flops(self._tower, [each[a]]) + image_flops(self._tower, [each[b]])
                    savings[place] -= image_flops(self._tower, [each[a], each[b]])
        lengths = [sum(num_passed(each[i], shares=shares) for each in halves) for i in order]
        costs = [
            sum(self._cost(r.num_tokens, int(r.predicted.sum())) + image_flops(self._tower, [r]) for r in pair)
            for pair in ([each[i] for each in halves] for i in order)
        ]
        planned = plan_micro_batches(
            # A row's paths are not parted: where they share nothing and together fill more than a micro-batch, the row
            # has one of its own.
            [
                min(length, self.room) if not shares and any(each[i].forks for each in halves) else length
                for length, i in zip(lengths, order, strict=True)
            ],
            layout.dp,
            self._role.settings.micro_batch_tokens,
            # Interleaved pipelines take micro-batches in groups of pp.
            multiple=layout.pp if layout.virtual_pp > 1 else 1,
            costs=costs,
            shared=shared,
            savings=savings,
        )
        metrics = imbalance_metrics(planned, lengths, costs, shared, savings)
        # The branches of a row share what lies before them.
        apart = sum(num_passed(row, shares=False) for each in halves for row in each)
        computed = (1 - metrics["perf/shared_tokens_frac"]) * sum(lengths)
        metrics["perf/shared_tokens_frac"] = 1 - computed / apart
        plan = MicroBatchPlan([[[order[i] for i in members] for members in bins] for bins in planned])
        return plan.paired(half) if paired else plan, metrics

    def _cost(self, num_tokens: int, num_head_tokens: int) -> int:
        if self._dims is None:
            return num_tokens
        return forward_flops(self._dims, num_tokens=num_tokens, num_head_tokens=num_head_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUpdate:
    """The result of a batch's optimizer steps.

    metrics: means over the steps. before: what the role computed before its first step, by index of the rows in the
    first mini-batch, unless the rows have `old_logprobs`; nothing is known of the other rows, as the policy has moved
    when their turn comes. divergences: those of the tokens of the first mini-batch's rows from a teacher in the loss.
    """

    metrics: Mapping[str, float]
    before: Mapping[int, FloatArray]
    divergences: Mapping[int, FloatArray] = field(default_factory=dict)


class RoleUpdater(RolePasses):
    """The forward passes and optimizer steps of a trained role; its schedule has `total_steps` optimizer steps."""

    def __init__(
        self,
        workers: "RoleWorkers",
        role: RoleSpec,
        objective: CountedObjective,
        *,
        total_steps: int,
        temperature: float = 1.0,
        dims: Dims | None = None,
        teaching: Teaching | None = None,
        is_taught: bool = False,
        step_scale: Callable[[Sequence[Row]], float] = lambda _: 1.0,
        measures: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Make a role's updates. is_taught: as in `WeightWatch`. step_scale: by what these rows' learning rate is
        multiplied. measures: whether to measure how far a training step moves layers.
        """
        super().__init__(workers, role, temperature=temperature, dims=dims)
        self._step_scale, self._measures = step_scale, measures
        self._objective, self._total_steps, self._teaching = objective, total_steps, teaching
        self.num_optimizer_steps, self._watch = 0, WeightWatch(role.role, is_taught=is_taught, dtype=role.model.dtype)

    def update(
        self, rows: Sequence[Row], state: AlgoState, *, step: int, with_outputs: bool = True, number: int = 0
    ) -> UpdateResult:
        """Take one optimizer step on these rows; the result's `before`, for `with_outputs`, is in row order.

        number: that of the batch, under which ranks may keep it. Raises RunError if the first updates have something to
        learn, and move nothing.
        """
        optimizer, teaching = self._role.settings.optimizer, self._teaching
        if teaching is not None and teaching.kept is not None:
            teaching = replace(teaching, kept=number)
        scale = self._step_scale(rows)
        request = UpdateRequest(
            role=self._role.role,
            step=step,
            objective=self._objective,
            state=state,
            denominators=self._objective.denominators(rows),
            temperature=self._temperature,
            lr=scale * learning_rate(optimizer, self.num_optimizer_steps, self._total_steps),
            with_outputs=with_outputs,
            teaching=teaching,
            watches=not self._watch.is_done,
            measures=self._measures(step),
        )
        result = self._learn(self._workers.update, rows, request)
        self.num_optimizer_steps += 1
        is_last, warms_up = self.num_optimizer_steps >= self._total_steps, request.lr < optimizer.lr
        self._watch.look(rows, result, step=step, is_last=is_last, warms_up=warms_up)
        return result

    def accumulate(
        self,
        rows: Sequence[Row],
        state: AlgoState,
        objective: CountedObjective,
        *,
        step: int,
        denominators: Denominators | None = None,
    ) -> UpdateResult:
        """Add the gradient of an objective on these rows to those that the next `apply` takes.

        denominators: what divides the objective's sums; None: its counts over these rows.
        """
        request = AccumulateRequest(
            role=self._role.role,
            step=step,
            objective=objective,
            state=state,
            denominators=objective.denominators(rows) if denominators is None else denominators,
            temperature=self._temperature,
            with_outputs=False,
        )
        return self._learn(self._workers.accumulate, rows, request)

    def apply(self, request: StepRequest) -> dict[str, float]:
        """Take an optimizer step with the accumulated gradients, and return its metrics."""
        metrics = self._workers.apply(request)
        self.num_optimizer_steps += 1
        return metrics

    def _learn(
        self,
        call: Callable[[Sequence[Row], MicroBatchPlan, RequestT], UpdateResult],
        rows: Sequence[Row],
        request: RequestT,
    ) -> UpdateResult:
        """Call the ranks with what the request's objective reads of the rows; outputs come back in row order."""
        teaching = request.teaching
        likely, hinted = (False, False) if teaching is None else (teaching.role is None, teaching.reads_hints)
        needed = self._sent(rows, request.objective.reads, likely=likely, hinted=hinted)
        if self._dims is not None and self._dims.experts is not None:
            needed = counted_once(needed)
        # Micro-batches have room for rows as their teacher reads them.
        taught = [row.as_taught for row in needed] if hinted else needed
        plan, imbalance = self._plan(taught, paired=PAIRS in request.denominators)
        result = call(needed, plan, request)
        # The critic's rows are those of the actor.
        metrics = {**result.metrics, **({} if self._role.role is Role.CRITIC else imbalance)}
        return replace(result, metrics=metrics, before={i: result.before[i] for i in sorted(result.before)})

    def _keep(self, batches: Sequence[Sequence[Row]], *, step: int) -> None:
        """Let ranks keep hidden states of each optimizer batch, before its update, by the weights that sampled."""
        request = ForwardRequest(role=self._role.role, temperature=self._temperature, step=step)
        for number, rows in enumerate(batches):
            sent, asked = self._sent(rows, frozenset({LAG})), replace(request, keeps=number, lags=lags_of(rows))
            self._workers.forward(sent, self._plan(sent, paired=False)[0], asked)

    def update_on_batch(
        self, rows: Sequence[Row], state: AlgoState, *, step: int, mini_batch_prompts: int, num_epochs: int
    ) -> BatchUpdate:
        """Pass `num_epochs` times over a batch, one optimizer step per mini-batch of `mini_batch_prompts` groups."""
        sums, before, divergences = dict[str, float](), dict[int, FloatArray](), dict[int, FloatArray]()
        is_known = TokenQuantity.OLD_LOGPROBS in rows[0].quantities
        batches = optimizer_batches([row.uid for row in rows], mini_batch_prompts)
        if self._teaching is not None and self._teaching.kept is not None:
            self._keep([[rows[i] for i in indices] for indices in batches], step=step)
        num_steps = num_epochs * len(batches)
        for number in range(num_steps):
            indices = batches[number % len(batches)]
            asked = number == 0 and (not is_known or self._teaching is not None)
            part = [rows[i] for i in indices]
            result = self.update(part, state, step=step, with_outputs=asked, number=number % len(batches))
            if asked and not is_known:
                before = {i: result.before[place] for place, i in enumerate(indices)}
            divergences |= {indices[place]: values for place, values in result.divergences.items()}
            for name, value in result.metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        means = {name: value / num_steps for name, value in sums.items()}
        return BatchUpdate(metrics=means, before=before, divergences=divergences)
