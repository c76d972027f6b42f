"""What the trainer saves after training converts to what it exports."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.convert.commands import mcore_to_hf
from megarl.convert.engine import ConvertSettings
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.helpers.convert_ranks import train_and_save
from tests.helpers.hf_models import assert_same_tensors, make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

# Minutes beside what the default set has of it.
pytestmark = pytest.mark.long

Pools: TypeAlias = Callable[[int], RankPool]

LAYOUTS = {
    "tp1": LayoutConfig(),
    "tp2-pp2": LayoutConfig(tp=2, pp=2, first_stage_layers=3, sequence_parallel=True),
    "tp2-ep2": LayoutConfig(tp=2, ep=2, sequence_parallel=True, dp=2),
}


def settings(out: Path) -> ConvertSettings:
    return ConvertSettings(out=out, num_workers=1)


def actor_config(layout: LayoutConfig) -> ActorConfig:
    return ActorConfig(layout=layout, optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=64)


def export_files(model: Path, directory: Path, dtype: str) -> list[str]:
    return [str(file) for file in create_model_files(directory, weight_specs(read_model_spec(model), dtype))]


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "layout"),
    [
        ("qwen3", False, "float32", "tp2-pp2"),
        ("qwen2", True, "bfloat16", "tp2-pp2"),
        ("llama", False, "float32", "tp1"),
        ("phi3", False, "bfloat16", "tp2-pp2"),
        ("qwen3_moe-mixed", False, "float32", "tp2-ep2"),
        ("deepseek_v3", False, "bfloat16", "tp2-ep2"),
        ("gpt_oss", False, "bfloat16", "tp2-ep2"),
        ("gemma3", False, "bfloat16", "tp2-pp2"),
        ("olmo3", False, "float32", "tp2-pp2"),
        ("minimax_m2", False, "bfloat16", "tp2-ep2"),
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
