"""Families with experts equal transformers in logits, log-probs and gradients, in every layout of their experts."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.helpers import ranks
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
QUICK = {(name, "tp2-sp ep2") for name in ("qwen2_moe", "glm4_moe", "glm4_moe_lite")}
CASES = [
    pytest.param(name, layout, id=f"{name}-{layout}", marks=() if (name, layout) in QUICK else pytest.mark.long)
    for name in WITH_EXPERTS
    for layout in LAYOUTS
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
    if name == "gpt_oss" and LAYOUTS[layout].etp > 1:
        pytest.skip("experts with biases are not split")
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


@pytest.mark.long
def test_bfloat16_weights_are_written_as_they_were_read(rank_pool: GetPool, tmp_path: Path) -> None:
    """Biases of routers stay in float32, as transformers keeps them."""
    wide = make_model(tmp_path / "wide", "deepseek_v3", tied=False)
    source, target = tmp_path / "source", tmp_path / "target"
    AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16).save_pretrained(source)
    files = create_model_files(target, weight_specs(read_model_spec(source), "bfloat16"))
    model = ModelConfig(path=str(source), dtype="bfloat16", vocab_multiple=4)
    actor = ActorConfig(layout=LAYOUTS["tp2-sp ep2"])
    rank_pool(2).run(ranks.load_and_store, actor, model, [str(file) for file in files])
    got, expected = (load_file(path / "model.safetensors") for path in (target, source))
    assert got.keys() == expected.keys()
    biases = [name for name, tensor in expected.items() if tensor.dtype is torch.float32]
    assert biases == [name for name in expected if name.endswith("e_score_correction_bias")] != []
    for name, tensor in expected.items():
        assert got[name].dtype is tensor.dtype
        bits = torch.int32 if name in biases else torch.int16
        assert torch.equal(got[name].view(bits), tensor.view(bits)), name
