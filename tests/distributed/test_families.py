"""Every model family equals transformers in logits, log-probs and gradients, and is written as it was read.

Each layout has four ranks: what tensor and pipeline parallelism leave over is data parallelism.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import (
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from megarl.config.schema import LayoutConfig
from tests.helpers.family_parity import (
    Model,
    Reference,
    assert_equals_transformers,
    make_checkpoint,
    run_transformers,
)
from tests.helpers.rank_pool import RankPool

LAYOUTS = {
    "tp1": LayoutConfig(dp=4),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True, dp=2),
    "pp2": LayoutConfig(pp=2, first_stage_layers=3, dp=2),
    "tp2-pp2": LayoutConfig(tp=2, pp=2, first_stage_layers=3),
}
# Tied embeddings where they lie on two stages and where they are split; the other pairs are long.
QUICK = {True: ("tp2-sp", "tp2-pp2"), False: ("tp1", "pp2")}

# With θ = 10000 and 16 dimensions the wavelengths are 6, 20, 63, 199, …: below 64/4, between, and above 64/1.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS = {
    # As older versions of transformers wrote it.
    "llama": Model(
        config=LlamaConfig,
        keys={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        written={"rope_theta": 500.0, "rope_scaling": None},
        left_out=("head_dim", "rope_parameters"),
    ),
    "llama-3": Model(config=LlamaConfig, keys={"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": Model(
        config=LlamaConfig,
        keys={"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        written={"rope_scaling": {"type": "linear", "factor": 4.0}},
        left_out=("head_dim", "rope_parameters"),
    ),
    "mistral": Model(config=MistralConfig, keys={"sliding_window": None}, left_out=("head_dim",)),
    "qwen2": Model(config=Qwen2Config),
    "qwen3": Model(config=Qwen3Config, keys={"head_dim": 24}),
}

GetPool = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Reference]:
    @functools.cache
    def get(name: str, tied: bool) -> Reference:
        return run_transformers(make_checkpoint(tmp_path_factory.mktemp(name), MODELS[name], tied=tied))

    return get


@pytest.mark.parametrize(
    ("tied", "layout"),
    [
        pytest.param(tied, name, id=f"{head}-{name}", marks=() if name in QUICK[tied] else pytest.mark.long)
        for head, tied in (("tied", True), ("untied", False))
        for name in LAYOUTS
    ],
)
@pytest.mark.parametrize("name", list(MODELS))
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
