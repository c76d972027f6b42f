"""Models with gated delta nets on a device; MEGARL_DEVICE=cpu runs these tests on the host."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.parallel.delta import delta_rule
from tests.helpers.bf16_parity import FAMILIES, assert_as_close_as_transformers
from tests.helpers.cuda import needs_devices
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.unit.parallel.test_delta import make_rows, recur

DEVICE = os.environ.get("MEGARL_DEVICE", "cuda")
pytestmark = [pytest.mark.gpu, *([] if DEVICE == "cpu" else [needs_devices(1)])]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1, timeout_s=180.0, device=DEVICE) as pool:
        yield pool


def test_chunks_equal_the_recurrence() -> None:
    """In float32 with fast decays, whose sums reach -640."""
    rows = [x.to(DEVICE) for x in make_rows(2, 200, torch.float32, 20.0)]
    expected = recur(*(x.double() for x in rows))
    torch.testing.assert_close(delta_rule(*rows).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_bfloat16_is_rounding_alone(pool: RankPool, tmp_path: Path, name: str) -> None:
    """Log-probs and gradients are as close to transformers' float32 as transformers' bfloat16."""
    path = make_model(tmp_path / "model", name, tied=False, dtype="bfloat16", **FAMILIES[name])
    assert_as_close_as_transformers(pool, path, tmp_path)
