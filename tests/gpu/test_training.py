"""bfloat16 training on CUDA, with Transformer Engine's layers where it is installed, and the memory it gives back."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.types.messages import Part
from tests.helpers.cuda import needs_devices
from tests.helpers.gpu_ranks import expected_attention, memory_around_offload, train
from tests.helpers.offload_ranks import never_offloaded, offload_between
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

pytestmark = [pytest.mark.gpu, needs_devices(1)]

GetPool = Callable[[int], RankPool]
ROWS = random_rows([(5, 12), (3, 20), (9, 7), (4, 15)], holes=False)
LAYOUTS = [
    pytest.param(LayoutConfig(), id="tp1"),
    pytest.param(LayoutConfig(tp=2, sequence_parallel=True), id="tp2-sp", marks=needs_devices(2)),
    pytest.param(LayoutConfig(dp=2), id="dp2", marks=needs_devices(2)),
]


@pytest.fixture(params=LAYOUTS)
def actor(request: pytest.FixtureRequest) -> ActorConfig:
    return ActorConfig(layout=request.param, optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=64)


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> ModelConfig:
    return ModelConfig(path=str(checkpoint(dtype="bfloat16")), dtype="bfloat16")


def test_the_platforms_layers_learn(gpu_pool: GetPool, actor: ActorConfig, model: ModelConfig) -> None:
    """Ten steps on the same four rows: the loss, log V at random, falls by far more than rounding."""
    pool = gpu_pool(actor.layout.world_size)
    (attention, *_) = pool.run(expected_attention)
    for rank in pool.run(train, actor, model, ROWS, 10):
        assert rank.devices == {"cuda"}
        assert rank.attention == {attention}
        if rank.history:
            assert all(math.isfinite(number) for step in rank.history for number in step)
            assert rank.history[-1][0] < 0.8 * rank.history[0][0]


def test_offloading_gives_memory_back(gpu_pool: GetPool, actor: ActorConfig, model: ModelConfig) -> None:
    for rank in gpu_pool(actor.layout.world_size).run(memory_around_offload, actor, model, ROWS):
        for part in Part:
            before, away, back = rank[part].held
            assert before - away == rank[part].released > 0
            assert back == before
            before, away, back = rank[part].allocated
            assert away < before
            assert back > away


def test_what_comes_back_is_what_went(gpu_pool: GetPool, actor: ActorConfig, model: ModelConfig) -> None:
    pool = gpu_pool(actor.layout.world_size)
    expected = pool.run(never_offloaded, actor, model, ROWS)
    traces = pool.run(offload_between, actor, model, ROWS)
    assert any(expected)
    assert all(trace.is_exact and trace.stayed == 0 for trace in traces)
    for trace, history in zip(traces, expected, strict=True):
        # In bfloat16, and CUDA adds gradients of embeddings in no fixed order.
        assert np.asarray(trace.history) == pytest.approx(np.asarray(history), rel=0.02)
