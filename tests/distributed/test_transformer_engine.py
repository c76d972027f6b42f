"""Models on Transformer Engine's own layers, whose compiled functions torch computes, equal those on megarl's."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.schema import ActorConfig, ModelConfig, OptimizerConfig
from megarl.types import Row
from megarl.weights.attention import AttentionOptions
from tests.distributed.test_adapters import (
    CASES,
    FLOAT32,
    LAYOUTS,
    GetPool,
    Merged,
    assert_equals_merged,
    case_of,
    reference,
)
from tests.helpers.adapter_ranks import adapter_layout, run_adapters
from tests.helpers.family_parity import TOLERANCE
from tests.helpers.forests import forest_errors, random_tree
from tests.helpers.hf_models import make_model
from tests.helpers.path_kernels import path_errors, random_paths
from tests.helpers.rank_pool import RankPool
from tests.helpers.te_reference import forests_despite, install

__all__ = ["reference"]

# Under sequence parallelism and full recomputation; grouped experts and latents; delta nets; biased, sinks.
QUICK = {
    ("qwen2", "tp2-sp", "full"),
    ("deepseek_v3", "tp2-sp-ep2", "none"),
    ("qwen3_next", "tp2-sp-ep2", "none"),
    ("gpt_oss", "tp2-sp-ep2", "none"),
}


@pytest.fixture(scope="module")
def te_pool() -> Iterator[GetPool]:
    """World size → its pool of ranks that find Transformer Engine."""
    pools: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def pool(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size, timeout_s=120.0, preloaded=False))
                pools[world_size].run(install)
            return pools[world_size]

        yield pool


@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in sorted({*CASES, *QUICK})],
)
def test_adapters_equal_merged_weights(
    te_pool: GetPool, reference: Callable[[str], Merged], name: str, layout: str, recompute: str
) -> None:
    expected, under = reference(name), LAYOUTS[layout]
    outcomes = te_pool(under.world_size).run(run_adapters, case_of(expected, under, recompute=recompute))
    tolerance = FLOAT32 if name.startswith(("qwen2", "qwen3_moe")) else TOLERANCE
    assert_equals_merged(outcomes, expected, tolerance=tolerance)


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3", "qwen3_next"])
def test_a_model_with_adapters_has_the_same_parameters(
    te_pool: GetPool, rank_pool: GetPool, reference: Callable[[str], Merged], name: str
) -> None:
    """Their names, but for those of grouped experts; shapes; what a sync sends; the memory of gradients."""
    case, under = case_of(reference(name), LAYOUTS["tp1"]), LAYOUTS["tp1"].world_size
    assert te_pool(under).run(adapter_layout, case, engine_layers=True) == rank_pool(under).run(
        adapter_layout, case, engine_layers=False
    )


@pytest.mark.parametrize("window", [None, 20])
def test_gathered_keys_equal_attention_path_by_path(te_pool: GetPool, window: int | None) -> None:
    paths = random_paths(0, 60, [1, 13, 17, 30, 3, 64, 25, 9, 40, 12, 2])
    (errors,) = te_pool(1).run(path_errors, "te", paths, (8, 2, 16), torch.float32, AttentionOptions(window=window))
    assert max(errors.values()) <= 1e-5


def trees_of(path: Path, name: str, layout: str, **settings: Any) -> tuple[ModelConfig, ActorConfig, list[list[Row]]]:
    """A model whose rows share prefixes, and rows that do."""
    model = ModelConfig(path=str(make_model(path / "model", name, tied=False)), dtype="float32", vocab_multiple=4)
    optimizer = OptimizerConfig(distributed=False, clip_grad_norm=1e9)
    actor = ActorConfig(layout=LAYOUTS[layout], share_prefixes=True, optimizer=optimizer, **settings)
    return model, actor, [random_tree(seed, max_leaves=12) for seed in (0, 2, 3)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3", "tp2-sp"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in itertools.product(("qwen3-windows", "phi3", "gemma3", "qwen3_5", "gpt_oss"), ("tp1", "tp2-sp"))
        ),
    ],
)
def test_trees_equal_rows_apart(te_pool: GetPool, tmp_path: Path, name: str, layout: str) -> None:
    """Gathered keys, and rotary positions by kernels that read bounds as they lie in memory."""
    model, actor, trees = trees_of(tmp_path, name, layout)
    found = te_pool(actor.layout.world_size).run(forest_errors, model, actor, trees, whole=False)
    assert np.array(found).max() <= 1e-5


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("absent", "ValueError: No dot product attention backend is available for the provided inputs."),
        ("wrong", "its results are off by 10.0%"),
        ("lost", "its results are off by nan%"),
    ],
)
def test_another_kernel_attends_where_fused_attention_does_not(
    te_pool: GetPool, tmp_path: Path, fault: str, why: str
) -> None:
    model, actor, trees = trees_of(tmp_path, "qwen3", "tp1")
    ((found, warned),) = te_pool(1).run(forests_despite, fault, model, actor, trees, whole=False)
    assert np.array(found).max() <= 1e-5
    (line,) = warned
    beginning = (
        "Transformer Engine cannot attend to prefixes that rows share, so torch's scaled_dot_product_attention does"
    )
    assert line.startswith(f"{beginning}: {why}")
    assert "\n" not in line
