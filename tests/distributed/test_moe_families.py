"""Families with experts equal transformers in logits, log-probs and gradients, in every layout of their experts."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from megarl.config.schema import LayoutConfig
from tests.helpers.family_parity import Reference, assert_equals_transformers, run_transformers
from tests.helpers.hf_models import WITH_EXPERTS, make_model
from tests.helpers.rank_pool import RankPool

LAYOUTS = {
    "tp1": LayoutConfig(),
    "ep2": LayoutConfig(dp=2, ep=2),
    "dp2": LayoutConfig(dp=2),
    "tp2-sp ep2": LayoutConfig(tp=2, sequence_parallel=True, ep=2),
    "tp2-sp etp2": LayoutConfig(tp=2, sequence_parallel=True, etp=2),
    # Experts have two replicas though there is one replica of everything else.
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2, first_stage_layers=3),
    "tp2-sp pp2": LayoutConfig(tp=2, sequence_parallel=True, pp=2, first_stage_layers=3),
    "pp2 ep2": LayoutConfig(pp=2, first_stage_layers=3, dp=2, ep=2),
    "tp2-sp dp2 ep2 etp2": LayoutConfig(tp=2, sequence_parallel=True, dp=2, ep=2, etp=2),
    "tp2-sp pp2 ep2": LayoutConfig(tp=2, sequence_parallel=True, pp=2, first_stage_layers=3, ep=2),
}

GetPool = Callable[[int], RankPool]

# Families whose layers no other test has; the rest are minutes of layouts, and test_moe_training.py has others trained.
QUICK = ("qwen2_moe", "glm4_moe", "glm4_moe_lite", "qwen3_next", "gpt_oss", "granitemoe")
CASES = [
    *(
        pytest.param(name, "tp2-sp ep2", id=f"{name}-tp2-sp ep2", marks=() if name in QUICK else pytest.mark.long)
        for name in WITH_EXPERTS
    ),
    *(pytest.param("qwen3_moe", layout, marks=pytest.mark.long) for layout in LAYOUTS if layout != "tp2-sp ep2"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @functools.cache
    def get(name: str) -> Reference:
        return run_transformers(make_model(tmp_path_factory.mktemp(name), name, tied=name == "mixtral"))

    return get


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_family_equals_transformers(
    rank_pool: GetPool, reference: Callable[[str], Reference], tmp_path: Path, name: str, layout: str
) -> None:
    expected = reference(name)
    assert_equals_transformers(rank_pool(LAYOUTS[layout].world_size), expected, LAYOUTS[layout], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe"])
def test_what_backward_computes_again_equals_transformers(
    rank_pool: GetPool,
    reference: Callable[[str], Reference],
    tmp_path: Path,
    name: str,
    recompute: Literal["selective", "full"],
) -> None:
    layout = LAYOUTS["tp2-sp ep2"]
    assert_equals_transformers(rank_pool(2), reference(name), layout, tmp_path, recompute=recompute)
