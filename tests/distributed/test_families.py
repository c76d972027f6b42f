"""Every model family equals transformers in logits, log-probs and gradients, and is written as it was read.

Each layout has four ranks: what tensor and pipeline parallelism leave over is data parallelism.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.schema import LayoutConfig
from megarl.weights.families import read_model_spec
from tests.helpers.family_parity import Reference, assert_equals_transformers, run_transformers
from tests.helpers.hf_models import DENSE, WINDOWED, make_model
from tests.helpers.rank_pool import RankPool

LAYOUTS = {
    "tp1": LayoutConfig(dp=4),
    "tp2": LayoutConfig(tp=2, dp=2),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True, dp=2),
    "pp2": LayoutConfig(pp=2, first_stage_layers=3, dp=2),
    "tp2-pp2": LayoutConfig(tp=2, pp=2, first_stage_layers=3),
    "pp2-vpp2": LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True, pipeline_layout="Et|tt|t|tL", dp=2),
}
# Untied embeddings with sequence parallelism, and for a family with biases and one that scales its embeddings tied ones
# where they are split and lie on two stages; the rest is long. Mistral's layers are Llama's, OLMo 2's are OLMo 3's.
TIED = ("qwen2", "gemma")
QUICK = {
    (name, name in TIED, "tp2-pp2" if name in TIED else "tp2-sp")
    for name in DENSE
    if not name.startswith(("mistral", "olmo2"))
}
QUICK.add(("qwen3-windows", False, "tp2-sp"))
# And uneven chunks.
QUICK.add(("mistral", True, "pp2-vpp2"))
CASES = [
    pytest.param(
        name,
        tied,
        layout,
        id=f"{name}-{'tied' if tied else 'untied'}-{layout}",
        marks=() if (name, tied, layout) in QUICK else pytest.mark.long,
    )
    for name in (*DENSE, *WINDOWED)
    for tied in (True, False)
    for layout in LAYOUTS
]

# More ranks than key/value heads: of the 10 heads of a group a rank has 2.5, of 8 with biases 4, of 6 beside experts 3.
SHARED_HEADS: dict[str, tuple[dict[str, int], LayoutConfig]] = {
    "qwen3": ({"num_attention_heads": 8, "num_key_value_heads": 1}, LayoutConfig(tp=4, sequence_parallel=True)),
    "qwen2": ({"num_key_value_heads": 1}, LAYOUTS["tp2-pp2"]),
    "qwen3_moe": ({"num_attention_heads": 8}, LayoutConfig(tp=4, ep=2, sequence_parallel=True)),
}

GetPool = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Reference]:
    @functools.cache
    def get(name: str, tied: bool) -> Reference:
        return run_transformers(make_model(tmp_path_factory.mktemp(name), name, tied=tied))

    return get


@pytest.mark.parametrize(("name", "tied", "layout"), CASES)
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


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen2", "qwen3_moe"))]
)
def test_ranks_that_share_key_value_heads_equal_transformers(rank_pool: GetPool, tmp_path: Path, name: str) -> None:
    """Logits, log-probs, gradients and their norm; weights are written as they were read."""
    changes, layout = SHARED_HEADS[name]
    model = make_model(tmp_path / "model", name, tied=False, **changes)
    assert layout.tp > read_model_spec(model).dims.num_kv_heads
    assert_equals_transformers(rank_pool(4), run_transformers(model), layout, tmp_path)
