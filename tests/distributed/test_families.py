"""Every model family equals transformers in logits, log-probs and gradients, and is written as it was read.

Each layout has four ranks: what tensor and pipeline parallelism leave over is data parallelism.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.schema import LayoutConfig
from tests.helpers.family_parity import Reference, assert_equals_transformers, run_transformers
from tests.helpers.hf_models import DENSE, make_model
from tests.helpers.rank_pool import RankPool

LAYOUTS = {
    "tp1": LayoutConfig(dp=4),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True, dp=2),
    "pp2": LayoutConfig(pp=2, first_stage_layers=3, dp=2),
    "tp2-pp2": LayoutConfig(tp=2, pp=2, first_stage_layers=3),
}
# Tied embeddings where they are split and lie on two stages, untied ones with sequence parallelism; the rest is long.
QUICK = {True: ("tp2-pp2",), False: ("tp2-sp",)}

GetPool = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Reference]:
    @functools.cache
    def get(name: str, tied: bool) -> Reference:
        return run_transformers(make_model(tmp_path_factory.mktemp(name), name, tied=tied))

    return get


@pytest.mark.parametrize(
    ("tied", "layout"),
    [
        pytest.param(tied, name, id=f"{head}-{name}", marks=() if name in QUICK[tied] else pytest.mark.long)
        for head, tied in (("tied", True), ("untied", False))
        for name in LAYOUTS
    ],
)
@pytest.mark.parametrize("name", list(DENSE))
def test_family_equals_transformers(
    rank_pool: GetPool,
    reference: Callable[[str, bool], Reference],
    tmp_path: Path,
    name: str,
    tied: bool,
    layout: str,
) -> None:
    expected = reference(name, tied)
    assert ("lm_head.weight" in expected.gradients) == (not tied)
    assert_equals_transformers(rank_pool(4), expected, LAYOUTS[layout], tmp_path)
