"""Gradients of several passes add up to those of one, in every layout, whatever happens between the passes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from tests.helpers.accumulation_ranks import Accumulation, accumulated_step
from tests.helpers.compare import assert_within
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

ROWS = random_rows([(5, 12), (3, 20), (9, 7), (4, 15), (6, 9), (2, 18)])
CHUNKS = [[0, 1], [2, 3], [4, 5]]
# With so large an epsilon and no momentum, Adam is gradient descent: a sign cannot hide an error.
LINEAR = {"eps": 1.0, "betas": (0.0, 0.0), "weight_decay": 0.0, "clip_grad_norm": 1e9}
WAYS = {
    "in chunks": Accumulation(chunks=CHUNKS),
    "divided at the step": Accumulation(chunks=CHUNKS, scaled_at_step=True),
    "offloaded between": Accumulation(chunks=CHUNKS, offloads=True),
}
AFTER_FAILURE = Accumulation(chunks=CHUNKS, fails=True)
SMALL = 1e-6


@pytest.mark.parametrize(
    ("layout", "overlaps"),
    [
        pytest.param(LayoutConfig(dp=2), False, id="dp2"),
        *(
            pytest.param(layout, overlaps, id=name, marks=pytest.mark.long)
            for name, layout, overlaps in (
                ("dp2, overlapping", LayoutConfig(dp=2), True),
                ("tp2-sp", LayoutConfig(tp=2, sequence_parallel=True), False),
                ("pp2", LayoutConfig(pp=2), False),
                ("cp2", LayoutConfig(cp=2), False),
                ("pp2 dp2, two chunks", LayoutConfig(pp=2, dp=2, virtual_pp=2, overlap_p2p=True), True),
            )
        ),
    ],
)
def test_passes_add_up(
    rank_pool: Callable[[int], RankPool], checkpoint: Callable[..., Path], layout: LayoutConfig, overlaps: bool
) -> None:
    model = ModelConfig(path=str(checkpoint(tied=True, num_layers=4)), dtype="float32")
    optimizer = OptimizerConfig(**LINEAR, overlap_grad_reduce=overlaps)
    actor = ActorConfig(layout=layout, micro_batch_tokens=32, optimizer=optimizer)
    pool = rank_pool(layout.world_size)
    expected = pool.run(accumulated_step, actor, model, ROWS, Accumulation(chunks=[list(range(len(ROWS)))]))
    # A stage waits for one that has failed.
    ways = WAYS if layout.pp > 1 else {**WAYS, "after a failure": AFTER_FAILURE}
    for way, case in ways.items():
        for one, other in zip(pool.run(accumulated_step, actor, model, ROWS, case), expected, strict=True):
            scale = sum(row.num_loss_tokens for row in ROWS) if case.scaled_at_step else 1.0
            assert_within(f"{way}: loss", sum(one.losses) / scale, sum(other.losses), atol=SMALL)
            assert_within(f"{way}: norm", one.grad_norm, other.grad_norm, atol=SMALL)
            for name, weight in one.weights.items():
                assert_within(f"{way}: {name}", weight.numpy(), other.weights[name].numpy(), atol=SMALL)
