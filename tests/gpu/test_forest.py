"""Attention over rows that share prefixes: Transformer Engine's, torch's FlexAttention and megarl's own, on a GPU."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.weights.attention import AttentionOptions
from tests.helpers.bf16_parity import SIZES, assert_as_close_as_transformers
from tests.helpers.cuda import needs_devices
from tests.helpers.forests import random_tree
from tests.helpers.hf_models import make_model
from tests.helpers.path_kernels import count_compilations, path_errors, random_paths
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.gpu, needs_devices(1)]

GetPool = Callable[[int], RankPool]
needs_te = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")
KINDS = [pytest.param("te", marks=needs_te), "flex", "torch"]
# A root and branches shorter and longer than a block of 128 tokens, at depths up to that of chance.
PATHS = random_paths(0, 520, [1, 130, 17, 300, 3, 64, 257, 9, 40, 128, 2])
# What roundings of inputs and outputs make of it.
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 4, 64), (8, 2, 64)], ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(gpu_pool: GetPool, kind: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Transformer Engine has no attention of packs in float32."""
    if kind == "te" and dtype is torch.float32:
        pytest.skip("no such kernel")
    (errors,) = gpu_pool(1).run(path_errors, kind, PATHS, shape, dtype, AttentionOptions())
    print(kind, dtype, shape, {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= LIMITS[dtype]


@pytest.mark.parametrize(
    "options",
    [AttentionOptions(window=100), AttentionOptions(score_cap=2.0), AttentionOptions(sinks=True, window=200)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_windows_caps_and_sinks(gpu_pool: GetPool, kind: str, options: AttentionOptions) -> None:
    if (kind == "te" and options.sinks) or (kind != "torch" and options.score_cap):
        pytest.skip("megarl's own attention is used")
    dtype = torch.bfloat16 if kind == "te" else torch.float32
    (errors,) = gpu_pool(1).run(path_errors, kind, PATHS, (8, 2, 64), dtype, options)
    print(kind, options, {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= LIMITS[dtype]


def test_packs_of_any_length_take_the_same_kernels(gpu_pool: GetPool) -> None:
    packs = [random_paths(i, 200 + 37 * i, [50 + i, 129, 7, 260 + 3 * i]) for i in range(6)]
    (counts,) = gpu_pool(1).run(count_compilations, packs, (4, 2, 64))
    print("graphs after each pack:", counts)
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("kernel", ["gathered", "flex"])
@pytest.mark.parametrize("layers", [pytest.param("te", marks=needs_te), "local"])
def test_a_models_trees_are_rounding_from_rows_apart(
    gpu_pool: GetPool, local_pool: GetPool, tmp_path: Path, layers: str, kernel: str, name: str
) -> None:
    """Log-probs and gradients of packs of trees against transformers' on row after row."""
    path = make_model(tmp_path / "model", name, tied=False, dtype="bfloat16", **SIZES)
    pool = (gpu_pool if layers == "te" else local_pool)(1)
    rows = [row for seed in (1, 4, 10) for row in random_tree(seed, max_leaves=12)]
    settings: dict[str, Any] = {"share_prefixes": True, "prefix_attention": kernel}
    assert_as_close_as_transformers(pool, path, tmp_path, rows=rows, settings=settings)
