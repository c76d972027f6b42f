"""Engines that record experts do so for every layer and expert that the trainer replays, by published configs."""

from pathlib import Path

import pytest

from megarl.weights.families import ModelSpec, read_model_spec

CONFIGS = Path(__file__).parents[3] / "configs" / "model" / "hf"
SPECS = {path.name: read_model_spec(path) for path in sorted(CONFIGS.iterdir())}


@pytest.mark.parametrize("spec", [pytest.param(spec, id=name) for name, spec in SPECS.items() if spec.dims.experts])
def test_vllm_counts_layers_and_experts_as_the_trainer_does(spec: ModelSpec) -> None:
    import vllm.config  # noqa: F401
    from transformers import AutoConfig
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = AutoConfig.from_pretrained(spec.path)
    found = ModelArchConfigConvertorBase(config, config.get_text_config())
    assert spec.dims.experts is not None
    assert found.get_num_experts() == spec.dims.experts.num
    assert found.get_num_experts_per_token() == spec.dims.experts.per_token
    # Dense layers and those of linear attention are counted as well.
    assert found.get_num_hidden_layers() == spec.dims.num_layers
