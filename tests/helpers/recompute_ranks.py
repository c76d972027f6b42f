"""Gradients with and without recompute, on a rank, and which modules ran how often."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.algos.objectives import SftAlgorithm
from megarl.config.schema import ActorConfig, ModelConfig
from megarl.types import Row
from megarl.types.messages import Role, UpdateRequest
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import load_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Gradients by parameter, and how often each module ran in an update."""

    gradients: dict[str, torch.Tensor]
    calls: Counter[str]
    # How many numbers are left of each output of the stage's chunks, after the update.
    left: tuple[int, ...] = ()


def backward_of(
    context: RankContext,
    actor: ActorConfig,
    model: ModelConfig,
    rows: Sequence[Row],
    micro_batches: Sequence[Sequence[int]],
    keeps_outputs: bool = False,
) -> Backward:
    """One update of the mean negative log-likelihood."""
    worker = load_worker(context, actor, model)
    chunks, outputs = worker.roles[Role.ACTOR].chunks, list[torch.Tensor]()
    for chunk in chunks:
        chunk.config.deallocate_pipeline_outputs &= not keeps_outputs
        chunk.register_forward_hook(lambda *found: outputs.extend(x for x in found if isinstance(x, torch.Tensor)))
    calls, algorithm = Counter[str](), SftAlgorithm()
    for i, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            module.register_forward_hook(lambda *_, name=f"{i}.{name}": calls.update([name]))
    request = UpdateRequest(
        step=0,
        objective=algorithm,
        state=algorithm.initial_state(),
        denominators=algorithm.denominators(rows),
        temperature=1.0,
        lr=0.0,
    )
    worker.update(rows, micro_batches, request)
    named = (
        (f"{i}.{name}", parameter) for i, chunk in enumerate(chunks) for name, parameter in chunk.named_parameters()
    )
    left = tuple(output.numel() for output in outputs)
    return Backward(gradients={name: weight.main_grad.clone() for name, weight in named}, calls=calls, left=left)
