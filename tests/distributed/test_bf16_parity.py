"""In bfloat16 megarl's own layers are as close to transformers' float32 as transformers is in bfloat16."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.bf16_parity import FAMILIES, assert_as_close_as_transformers
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool


@pytest.mark.parametrize(
    "name", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_bfloat16_is_rounding_alone(rank_pool: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path / "model", name, tied=False, dtype="bfloat16", **FAMILIES[name])
    assert_as_close_as_transformers(rank_pool(1), path, tmp_path)
