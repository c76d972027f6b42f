"""Summing gradients while backward computes further ones changes no bit, also of those that the head adds itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.schema import ActorConfig, HeadConfig, LayoutConfig, ModelConfig, OptimizerConfig
from tests.helpers.hf_models import make_model
from tests.helpers.overlap_ranks import threads_of_groups, train_in_small_buckets
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

ROWS = random_rows([(5, 12), (3, 20), (9, 7), (4, 15), (6, 9), (2, 18)])
NUM_STEPS = 3
RECOMPUTE, IN_CHUNK = (HeadConfig(regime=memory_mode, chunk_tokens=16) for memory_mode in ("recompute", "in_chunk"))


@pytest.mark.parametrize(
    ("tied", "head", "layout", "gathers"),
    [
        pytest.param(False, RECOMPUTE, LayoutConfig(dp=2), False, id="untied", marks=pytest.mark.long),
        pytest.param(False, RECOMPUTE, LayoutConfig(dp=2), True, id="untied, weights too"),
        pytest.param(True, RECOMPUTE, LayoutConfig(dp=2), False, id="tied"),
        pytest.param(True, RECOMPUTE, LayoutConfig(dp=2), True, id="tied, weights too", marks=pytest.mark.long),
        pytest.param(False, IN_CHUNK, LayoutConfig(dp=2), False, id="in chunks", marks=pytest.mark.long),
        *(
            pytest.param(
                False,
                HeadConfig(regime="keep"),
                LayoutConfig(dp=2, pp=2, virtual_pp=2, overlap_p2p=True),
                gathers,
                id=f"two stages of two chunks{', weights too' if gathers else ''}",
                marks=pytest.mark.long,
            )
            for gathers in (False, True)
        ),
    ],
)
def test_overlap_changes_no_bit(
    rank_pool: Callable[[int], RankPool],
    checkpoint: Callable[..., Path],
    tied: bool,
    head: HeadConfig,
    layout: LayoutConfig,
    gathers: bool,
) -> None:
    """Two replicas add the same two numbers in either case. Several micro-batches, of which the last one counts.

    The norm is a sum over shards, which lie otherwise in buckets; so nothing is scaled by it.
    """
    model = ModelConfig(path=str(checkpoint(tied=tied, num_layers=4)), dtype="float32")
    optimizer = OptimizerConfig(lr=1e-2, clip_grad_norm=1e9)
    actor = ActorConfig(layout=layout, head=head, micro_batch_tokens=32, optimizer=optimizer)
    overlapping = replace(optimizer, overlap_grad_reduce=True, overlap_param_gather=gathers)
    pool = rank_pool(layout.world_size)
    expected = pool.run(train_in_small_buckets, actor, model, ROWS, NUM_STEPS)
    got = pool.run(train_in_small_buckets, replace(actor, optimizer=overlapping), model, ROWS, NUM_STEPS)
    assert any(rank.history for rank in got)
    for one, other in zip(got, expected, strict=True):
        for (loss, norm), (its_loss, its_norm) in zip(one.history, other.history, strict=True):
            assert loss == its_loss
            assert norm == pytest.approx(its_norm, rel=1e-6)
        assert one.weights.keys() == other.weights.keys()
        for name, weight in one.weights.items():
            assert torch.equal(weight, other.weights[name]), name
        assert [started for started, _ in (*other.under_way, *other.gathered)] == [0] * 2 * NUM_STEPS
        # The update leaves all weights on their way.
        assert all(started == gathers * num_groups for started, num_groups in one.gathered)
        # In its first step Megatron learns which gradients there are.
        assert one.under_way[0][0] == 0
        for started, num_groups in one.under_way[1:]:
            assert started == num_groups
    assert max(num_groups for rank in got for _, num_groups in rank.under_way) > 1


@pytest.mark.long
def test_weights_of_experts_arrive_as_well(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """They have buckets of their own. Here no two ranks hold the same experts."""
    path = make_model(tmp_path, "qwen3_moe", tied=False, norm_topk_prob=True, mlp_only_layers=[1])
    model = ModelConfig(path=str(path), dtype="float32")
    optimizer = OptimizerConfig(lr=1e-2, clip_grad_norm=1e9)
    actor = ActorConfig(layout=LayoutConfig(dp=2, ep=2), micro_batch_tokens=32, optimizer=optimizer)
    overlapping = replace(optimizer, overlap_grad_reduce=True, overlap_param_gather=True)
    expected = rank_pool(2).run(train_in_small_buckets, actor, model, ROWS, NUM_STEPS)
    got = rank_pool(2).run(train_in_small_buckets, replace(actor, optimizer=overlapping), model, ROWS, NUM_STEPS)
    for one, other in zip(got, expected, strict=True):
        assert [loss for loss, _ in one.history] == [loss for loss, _ in other.history]
        for name, weight in one.weights.items():
            assert torch.equal(weight, other.weights[name]), name


def test_no_two_operations_of_a_group_end_at_once(rank_pool: Callable[[int], RankPool]) -> None:
    """Otherwise torch may free the string with an operation's name twice, which aborts the process."""
    assert rank_pool(2).run(threads_of_groups, LayoutConfig(dp=2)) == [{1}, {1}]
