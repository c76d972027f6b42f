"""What a role really holds on a rank after an optimizer step, for comparison with the plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.types import Row
from megarl.types.messages import Part, Role
from tests.helpers.checkpoint_ranks import open_worker, train
from tests.helpers.rank_pool import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rank's pipeline stage, the elements of its parameters, and the bytes of each part of its actor."""

    stage: int
    num_parameters: int
    part_bytes: dict[Part, int]


def measure_held(context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row]) -> Held:
    """One step, so that the optimizer has its state; then move each part away and see what that releases."""
    worker = open_worker(context, actor, model)
    train(worker, actor, rows, range(1))
    parameters = {id(p): p.numel() for chunk in worker.roles[Role.ACTOR].chunks for p in chunk.parameters()}
    return Held(
        stage=worker.layout.pp_group.rank(),
        num_parameters=sum(parameters.values()),
        part_bytes={part: worker.offload(Role.ACTOR, [part]) for part in Part},
    )
