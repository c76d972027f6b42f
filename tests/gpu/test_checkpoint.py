"""A checkpoint that is written while training goes on continues it, with float32 main parameters on the device."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from tests.helpers.checkpoint_ranks import load_train, train_save_train
from tests.helpers.cuda import needs_devices
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

pytestmark = [pytest.mark.gpu, needs_devices(1)]

ROWS = random_rows([(5, 12), (3, 20), (9, 7), (4, 15), (6, 18), (2, 9), (8, 14), (7, 11)], holes=False)
LAYOUTS = [
    pytest.param(LayoutConfig(), id="tp1"),
    pytest.param(LayoutConfig(dp=2), id="dp2", marks=needs_devices(2)),
]


@pytest.mark.parametrize("portable", [False, True], ids=["as it is", "portable"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_where_it_was(
    gpu_pool: Callable[[int], RankPool],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    layout: LayoutConfig,
    portable: bool,
) -> None:
    """Written after step 3, while steps 4 to 6 run, which are then run again from it."""
    model = ModelConfig(path=str(checkpoint(dtype="bfloat16")), dtype="bfloat16")
    actor = ActorConfig(layout=layout, optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=64)
    pool = gpu_pool(layout.world_size)
    expected = pool.run(train_save_train, actor, model, ROWS, str(tmp_path), portable=portable)
    got = pool.run(load_train, actor, model, ROWS, str(tmp_path), same_layout=True)
    assert any(len(history) == 3 for history in expected)
    for history, other in zip(got, expected, strict=True):
        # CUDA adds gradients of embeddings in no fixed order.
        assert np.asarray(history) == pytest.approx(np.asarray(other), rel=0.02)
