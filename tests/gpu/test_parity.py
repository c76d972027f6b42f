"""Transformer Engine's layers, where it is installed, are as close to transformers' float32 as transformers' bfloat16.

Log-probs and gradients, in packs: dense, Gemma (norms that add one), experts, and attention through latents.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.bf16_parity import FAMILIES, assert_as_close_as_transformers
from tests.helpers.cuda import needs_devices
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.gpu, needs_devices(1)]


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_rounding_alone(gpu_pool: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path / "model", name, tied=False, dtype="bfloat16", **FAMILIES[name])
    assert_as_close_as_transformers(gpu_pool(1), path, tmp_path)
