"""Experts in stacked tensors, with biases, sinks, windows and YaRN (gpt-oss) or in sections, equal transformers.

Rows of the packs are up to nine windows long. The layout of the first test shows what Megatron has amiss with biases of
experts: that of the last layer is marked as if all tensor-parallel ranks had it, so its gradient would be summed over
them, and the norm would count only the first one's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from megarl.config.schema import LayoutConfig
from tests.helpers.family_parity import Reference, assert_equals_transformers, run_transformers
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool

GetPool = Callable[[int], RankPool]


def test_experts_with_sections(rank_pool: GetPool, tmp_path: Path) -> None:
    """Granite's gates and ups are rows of one tensor of all experts."""
    expected = run_transformers(make_model(tmp_path / "model", "granitemoe", tied=False))
    layout = LayoutConfig(tp=2, sequence_parallel=True, ep=2)
    assert_equals_transformers(rank_pool(2), expected, layout, tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return run_transformers(make_model(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss", tied=False))


def test_experts_over_tensor_parallel_ranks(rank_pool: GetPool, expected: Reference, tmp_path: Path) -> None:
    layout = LayoutConfig(tp=2, sequence_parallel=True, ep=2)
    assert_equals_transformers(rank_pool(2), expected, layout, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_layers_that_backward_computes_again(
    rank_pool: GetPool, expected: Reference, tmp_path: Path, recompute: Literal["selective", "full"]
) -> None:
    assert_equals_transformers(rank_pool(1), expected, LayoutConfig(), tmp_path, recompute=recompute)
