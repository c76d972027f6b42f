"""What a rank trains in several passes before one optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megarl.algos.objectives import SftAlgorithm
from megarl.config.schema import ActorConfig, ModelConfig
from megarl.data.packing import plan_micro_batches
from megarl.types import AlgoState, LossSums, PolicyOutputs, Row, RowBatch
from megarl.types.messages import AccumulateRequest, ForwardRequest, Part, Role, StepRequest
from tests.helpers.checkpoint_ranks import open_worker
from tests.helpers.rank_pool import RankContext

LR = 1.0


class FailsOn(SftAlgorithm):
    """Cross-entropy that fails on the row p1/0."""

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        if "p1/0" in rows.labels:
            raise LookupError("the loss does not know this row")
        return super().loss(rows, out, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """One optimizer step from the same weights: how rows are divided into passes, and what else happens."""

    chunks: Sequence[Sequence[int]]
    # Sums without denominators, which the step divides by.
    scaled_at_step: bool = False
    # Between any two passes, all is moved to the host, and a forward pass runs.
    offloads: bool = False
    # After the first pass, one fails on a replica, and all begin again.
    fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The sum of the passes' losses, on ranks that report; the norm of the gradients, and the weights afterwards."""

    losses: list[float]
    grad_norm: float
    weights: dict[str, torch.Tensor]


def accumulated_step(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], case: Accumulation
) -> Stepped:
    worker = open_worker(context, actor, model)
    objective, losses = SftAlgorithm(), list[float]()
    total = objective.denominators(rows)
    request = AccumulateRequest(
        step=1,
        objective=objective,
        state=AlgoState(),
        denominators={"tokens": 1.0} if case.scaled_at_step else total,
        temperature=1.0,
        with_outputs=False,
    )

    def mine(chunk: Sequence[int]) -> list[list[int]]:
        planned = plan_micro_batches(
            [rows[i].num_tokens for i in chunk], actor.layout.dp, actor.micro_batch_tokens, multiple=actor.layout.pp
        )
        return [[chunk[i] for i in batch] for batch in planned[worker.layout.dp_group.rank()]]

    def accumulate(chunk: Sequence[int]) -> None:
        result = worker.accumulate(rows, mine(chunk), request)
        if result is not None:
            losses.append(result.metrics["actor/loss"])

    first, *others = case.chunks
    accumulate(first)
    if case.fails:
        spoiling = replace(request, objective=FailsOn())
        try:
            answer = worker.accumulate(rows, mine([0, 1]), spoiling)
        except LookupError:
            answer = None
        assert answer is None or answer.metrics == {}
        losses.clear()
        accumulate(first)
    for chunk in others:
        if case.offloads:
            worker.offload(Role.ACTOR, list(Part))
            worker.onload(Role.ACTOR, [Part.PARAMS])
            worker.forward(rows, mine(chunk), ForwardRequest(role=Role.ACTOR, temperature=1.0, step=1))
            worker.onload(Role.ACTOR, list(Part))
        accumulate(chunk)
    scale = 1.0 / total["tokens"] if case.scaled_at_step else 1.0
    metrics = worker.apply(StepRequest(step=1, lr=LR, scale=scale, betas=(0.0, 0.0), clip=1e9))
    chunks = enumerate(worker.roles[Role.ACTOR].chunks)
    weights = {f"{i}.{name}": value.data.clone() for i, chunk in chunks for name, value in chunk.named_parameters()}
    return Stepped(losses=losses, grad_norm=metrics["actor/grad_norm"], weights=weights)
