"""Offloading gives all of a role's memory back, and what comes back is what went, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.types.messages import Part
from tests.helpers.offload_ranks import (
    host_bytes,
    never_offloaded,
    offload_between,
    offload_reference,
    suspend_between,
    use_while_offloaded,
)
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

Dtype: TypeAlias = Literal["float32", "bfloat16"]
ROWS = random_rows([(5, 12), (3, 20), (9, 7), (4, 15)], holes=False)
TP2 = LayoutConfig(tp=2, sequence_parallel=True)
DP2 = LayoutConfig(dp=2)


def setting(path: Path, dtype: Dtype, layout: LayoutConfig, distributed: bool) -> tuple[ActorConfig, ModelConfig]:
    actor = ActorConfig(
        layout=layout, optimizer=OptimizerConfig(lr=1e-2, distributed=distributed), micro_batch_tokens=64
    )
    return actor, ModelConfig(path=str(path), dtype=dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "layout", "distributed"),
    [("float32", TP2, True), ("bfloat16", DP2, True), ("bfloat16", TP2, False)],
    ids=["float32-tp2", "bfloat16-dp2", "bfloat16-tp2-replicated-optimizer"],
)
def test_away_and_back_changes_nothing(
    rank_pool: Callable[[int], RankPool],
    checkpoint: Callable[..., Path],
    dtype: Dtype,
    layout: LayoutConfig,
    distributed: bool,
) -> None:
    actor, model = setting(checkpoint(tied=True, dtype=dtype), dtype, layout, distributed)
    expected = rank_pool(2).run(never_offloaded, actor, model, ROWS)
    traces = rank_pool(2).run(offload_between, actor, model, ROWS)
    assert any(expected)
    assert [trace.history for trace in traces] == expected
    for trace in traces:
        assert trace.is_exact
        # Nothing that the actor computes with keeps memory, and every part gave some back.
        assert trace.stayed == 0
        assert all(num_bytes > 0 for num_bytes in trace.released.values())


def test_nothing_communicates_while_communicators_are_suspended(
    rank_pool: Callable[[int], RankPool], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Training goes on to the bit; a checkpoint that was being written wakes them, and they sleep again."""
    actor, model = setting(checkpoint(tied=True, dtype="float32"), "float32", DP2, distributed=True)
    expected = rank_pool(2).run(never_offloaded, actor, model, ROWS)
    seen = rank_pool(2).run(suspend_between, actor, model, ROWS, str(tmp_path))
    assert [history for history, _, _ in seen] == expected
    for _, calls, names in seen:
        assert calls == ["suspend", "resume", "suspend", "resume"]
        assert len(names) > 2
        assert set(names) == {"ProcessGroupGloo"}


@pytest.mark.long
def test_released_bytes(rank_pool: Callable[[int], RankPool], checkpoint: Callable[..., Path]) -> None:
    """Two ranks, bfloat16, a distributed optimizer: 2 B a parameter, 4 B of gradient, and half of 12 B of state."""
    actor, model = setting(checkpoint(tied=True, dtype="bfloat16"), "bfloat16", DP2, True)
    traces = rank_pool(2).run(offload_between, actor, model, ROWS)
    # Embedding (264 rows, padded to 384), two layers (norms, QKV of 4 + 2·2 heads of 32, output, MLP), last norm.
    layer = 2 * 64 + 2 * 32 + 64 * 256 + 128 * 64 + 3 * 64 * 96
    size = 384 * 64 + 2 * layer + 64
    for trace in traces:
        # Megatron pads each bucket so that it splits into equal, aligned shards.
        assert trace.released[Part.PARAMS] == pytest.approx(2 * size, rel=0.02)
        assert trace.released[Part.GRADS] == pytest.approx(4 * size, rel=0.02)
    assert sum(trace.released[Part.OPTIMIZER] for trace in traces) == 12 * size


def test_gradients_take_no_host_memory_and_buffers_are_used_again(
    rank_pool: Callable[[int], RankPool], checkpoint: Callable[..., Path]
) -> None:
    actor, model = setting(checkpoint(tied=True, dtype="bfloat16"), "bfloat16", DP2, True)
    for expected, made in rank_pool(2).run(host_bytes, actor, model, ROWS):
        assert sum(made) == expected


@pytest.mark.long
def test_a_frozen_role_has_only_parameters(
    rank_pool: Callable[[int], RankPool], checkpoint: Callable[..., Path]
) -> None:
    actor, model = setting(checkpoint(tied=True), "float32", TP2, True)
    for released, is_same in rank_pool(2).run(offload_reference, actor, model, ROWS):
        assert is_same
        assert released[Part.PARAMS] > 0
        assert released[Part.GRADS] == released[Part.OPTIMIZER] == 0


@pytest.mark.long
def test_what_is_on_the_host_cannot_be_used(
    rank_pool: Callable[[int], RankPool], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    actor, model = setting(checkpoint(tied=True), "float32", TP2, True)
    for errors in rank_pool(2).run(use_while_offloaded, actor, model, ROWS, [str(tmp_path / "unused")]):
        missing = ["params", "optimizer", "grads", "params"]
        assert errors == [f"the actor's {part} are offloaded; onload them first" for part in missing]
