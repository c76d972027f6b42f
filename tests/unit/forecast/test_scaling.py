"""The run files for 8 to 512 GPUs suit their models, and leave a tenth of each GPU free."""

from pathlib import Path

import pytest

from megarl.config.check import check_train
from megarl.config.check_model import check_model
from megarl.config.load import load_config
from megarl.weights.families import read_model_spec

ROOT = Path(__file__).parents[3]
SIZES = {"qwen3-8b": 8, "qwen3-30b-a3b": 16, "qwen3-32b": 32, "qwen3-235b-a22b": 128, "deepseek-v3": 512}


@pytest.mark.parametrize("model", SIZES)
def test_run_files_suit_their_models(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(Path(f"configs/run/gsm8k-{model}.yaml"))
    check_train(config)
    check_model(config, read_model_spec(f"configs/model/hf/{model}").hf_config)
    assert config.actor.layout.world_size == SIZES[model]
