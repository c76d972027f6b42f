"""Families with norms after attention and MLP, with two kinds of rope, or with norms over all heads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import LayoutConfig
from megarl.types import Row
from tests.helpers.family_parity import (
    assert_equals_transformers,
    make_rows,
    run_transformers,
)
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool

GetPool = Callable[[int], RankPool]
TP2 = LayoutConfig(tp=2, sequence_parallel=True)


def rows_with_shared_prompts() -> Sequence[Row]:
    """The last row again, with a prompt longer than the windows of models, and before other responses."""
    rows = make_rows()
    last, generator = rows[-1], np.random.default_rng(1)
    others = [
        replace(
            last,
            sample_index=i,
            token_ids=np.concatenate([last.token_ids[: last.num_prompt_tokens], generator.integers(0, 517, length)]),
            loss_mask=np.arange(length) % 3 != 1,
        )
        for i, length in ((1, 3), (2, 19))
    ]
    return [*rows, *others]


@pytest.mark.parametrize(
    "name", ["olmo3", *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma2", "gemma3", "olmo2"))]
)
def test_shared_prompts_and_recompute(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    rows = rows_with_shared_prompts()
    expected = run_transformers(make_model(tmp_path / "model", name, tied=False), rows=rows)
    assert_equals_transformers(rank_pool(2), expected, TP2, tmp_path, rows=rows, recompute="full")


def test_minimax_m2_equals_transformers(rank_pool: GetPool, tmp_path: Path) -> None:
    expected = run_transformers(make_model(tmp_path / "model", "minimax_m2", tied=False))
    assert_equals_transformers(rank_pool(2), expected, replace(TP2, ep=2), tmp_path)
