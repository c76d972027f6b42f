"""What a rank trains while gradients are summed during backward, in buckets much smaller than Megatron's."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from megarl.config.schema import ActorConfig, ModelConfig
from megarl.types import Row
from megarl.types.messages import Role
from tests.helpers.checkpoint_ranks import open_worker, train
from tests.helpers.offload_ranks import History
from tests.helpers.rank_pool import RankContext

BUCKET_ELEMENTS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses and norms; weights; by step, how many groups of buckets of all were under way at the end of backward."""

    history: History
    weights: dict[str, torch.Tensor]
    under_way: list[tuple[int, int]]


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
        under_way.append((sum(group.grad_reduce_handle is not None for group in groups), len(groups)))
        finish(models, *arguments, **options)

    with mock.patch.object(roles, "DistributedDataParallelConfig", small):
        worker = open_worker(context, actor, model)
    with mock.patch.object(roles, "finalize_model_grads", look):
        history = train(worker, actor, rows, range(num_steps))
    chunks = enumerate(worker.roles[Role.ACTOR].chunks)
    weights = {f"{i}.{name}": value.data.clone() for i, chunk in chunks for name, value in chunk.named_parameters()}
    return Outcome(history=history, weights=weights, under_way=under_way)
