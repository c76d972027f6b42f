"""Converted checkpoints in the trainer: every layout loads them, and what it saves converts to what it exports."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.convert.commands import hf_to_mcore, mcore_to_hf
from megarl.convert.engine import Settings
from megarl.export import weight_specs
from megarl.parallel.weights.families import read_model_spec
from megarl.safetensors_map import create_model_files
from tests.helpers.convert_ranks import load_converted, train_and_save
from tests.helpers.hf_models import DENSE, WITH_EXPERTS, assert_same_tensors, make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

# Minutes beside what the default set has of it.
pytestmark = pytest.mark.long

Pools: TypeAlias = Callable[[int], RankPool]

LAYOUTS = {
    "tp1": LayoutConfig(),
    "tp2-pp2": LayoutConfig(tp=2, pp=2, first_stage_layers=3, sequence_parallel=True),
    "pp2-vpp2": LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True),
    "tp2-ep2": LayoutConfig(tp=2, ep=2, sequence_parallel=True, dp=2),
}
EXPERT_LAYOUTS = ("tp1", "tp2-pp2", "tp2-ep2")
QUICK = [("qwen2", True, "tp2-pp2"), ("qwen3_moe-mixed", False, "tp2-ep2")]
CASES = [
    *((family, tied, layout) for family in DENSE for tied in (True, False) for layout in list(LAYOUTS)[:3]),
    *((family, False, layout) for family in WITH_EXPERTS for layout in EXPERT_LAYOUTS),
]


def settings(out: Path) -> Settings:
    return Settings(out=out, num_workers=1)


def actor_config(layout: LayoutConfig) -> ActorConfig:
    return ActorConfig(layout=layout, optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=64)


def export_files(model: Path, directory: Path, dtype: str) -> list[str]:
    return [str(file) for file in create_model_files(directory, weight_specs(read_model_spec(model), dtype))]


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        pytest.param(*case, id=f"{case[0]}-{'tied' if case[1] else 'untied'}-{case[2]}", marks=marks)
        for case in CASES
        for marks in [() if case in QUICK else pytest.mark.long]
    ],
)
def test_the_trainer_loads_a_converted_model(
    rank_pool: Pools, tmp_path: Path, family: str, tied: bool, layout: str
) -> None:
    """NaN everywhere, then Megatron's strict loading: the weights are those of the files, bit for bit."""
    # Two stages of two virtual ones want four layers.
    changes = {"num_hidden_layers": 4} if layout == "pp2-vpp2" else {}
    source = make_model(tmp_path / "hf", family, tied=tied, **changes)
    hf_to_mcore(source, settings(tmp_path / "dist"))
    model, config = ModelConfig(path=str(source), dtype="float32"), LAYOUTS[layout]
    rank_pool(config.world_size).run(
        load_converted,
        actor_config(config),
        model,
        str(tmp_path / "dist"),
        export_files(source, tmp_path / "loaded", "float32"),
    )
    assert_same_tensors(tmp_path / "loaded", source)


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "layout"),
    [
        ("qwen3", False, "float32", "tp2-pp2"),
        pytest.param("qwen2", True, "bfloat16", "tp2-pp2", marks=pytest.mark.long),
        pytest.param("llama", False, "float32", "tp1", marks=pytest.mark.long),
        pytest.param("qwen3_moe-mixed", False, "float32", "tp2-ep2", marks=pytest.mark.long),
        pytest.param("deepseek_v3", False, "bfloat16", "tp2-ep2", marks=pytest.mark.long),
    ],
)
def test_what_the_trainer_saves_converts_to_what_it_exports(
    rank_pool: Pools, tmp_path: Path, family: str, tied: bool, dtype: str, layout: str
) -> None:
    source, config = make_model(tmp_path / "hf", family, tied=tied, dtype=dtype), LAYOUTS[layout]
    model = ModelConfig(path=str(source), dtype=dtype)  # type: ignore[arg-type]
    rows = random_rows([(5, 12), (3, 20), (9, 7), (4, 15)], holes=False)
    files = export_files(source, tmp_path / "exported", dtype)
    rank_pool(config.world_size).run(train_and_save, actor_config(config), model, rows, str(tmp_path / "saved"), files)
    mcore_to_hf(tmp_path / "saved" / "actor", settings(tmp_path / "converted"), model=source)
    assert_same_tensors(tmp_path / "converted", tmp_path / "exported")
    with pytest.raises(AssertionError):
        assert_same_tensors(tmp_path / "converted", source)
