"""What a rank trains while gradients are summed during backward, in buckets much smaller than Megatron's."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.host.device.groups import backends_of_groups
from megarl.types import Row
from megarl.types.messages import Part, Role
from tests.helpers.checkpoint_ranks import open_worker, train
from tests.helpers.offload_ranks import History
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout

BUCKET_ELEMENTS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses and norms; weights; by step, how many groups of buckets of all were under way at the end of backward, and
    those whose weights were after the update.
    """

    history: History
    weights: dict[str, torch.Tensor]
    under_way: list[tuple[int, int]]
    gathered: list[tuple[int, int]]


def train_in_small_buckets(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], num_steps: int
) -> Outcome:
    """Steps on the same rows, some of which have several micro-batches."""
    from megarl.parallel import roles

    small = functools.partial(roles.DistributedDataParallelConfig, bucket_size=BUCKET_ELEMENTS)
    under_way = list[tuple[int, int]]()
    finish = roles.finalize_model_grads

    def look(models: Sequence[roles.DistributedDataParallel], *arguments: object, **options: object) -> None:
        groups = [group for chunk in models for group in chunk.bucket_groups]
        # Also that of the output weight, which no module of Megatron's reads.
        assert all(group.param_gather_handle is None for group in groups)
        under_way.append((sum(group.grad_reduce_handle is not None for group in groups), len(groups)))
        finish(models, *arguments, **options)

    with mock.patch.object(roles, "DistributedDataParallelConfig", small):
        worker = open_worker(context, actor, model)
    with mock.patch.object(roles, "finalize_model_grads", look):
        history, gathered = [], []
        for step in range(num_steps):
            history += train(worker, actor, rows, range(step, step + 1))
            groups = [group for chunk in worker.roles[Role.ACTOR].ddp for group in chunk.bucket_groups]
            gathered.append((sum(group.param_gather_handle is not None for group in groups), len(groups)))
    # As whoever sends or stores weights gets them.
    chunks = enumerate(worker._role(Role.ACTOR, Part.PARAMS).chunks)
    weights = {f"{i}.{name}": value.data.clone() for i, chunk in chunks for name, value in chunk.named_parameters()}
    return Outcome(history=history, weights=weights, under_way=under_way, gathered=gathered)


def threads_of_groups(context: RankContext, layout: LayoutConfig) -> set[int]:
    """How many threads torch's groups have each."""
    join_layout(context, layout)
    return {group.options._threads for group in backends_of_groups("gloo", torch.device("cpu"))}
