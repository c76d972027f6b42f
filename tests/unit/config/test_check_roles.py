"""Rules of reference and critic, by their messages."""

from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.config.check_model import check_model
from megarl.errors import ConfigError

HF_CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
}
# 2 tensor-parallel ranks; 20 steps of 12 rows, in 2 optimizer steps of 6.
RUN: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "data": {"train": ["train.parquet"], "max_prompt_tokens": 100},
    "sft": {"train": ["demos.parquet"]},
    "actor": {"layout": {"tp": 2, "dp": 2}},
    "rollout": {"num_samples": 3, "max_response_tokens": 28},
    "trainer": {"total_steps": 20, "prompts_per_step": 4, "mini_batch_prompts": 2},
}


def config(**sections: Any) -> Config:
    return from_dict(Config, {**RUN, **sections})


def test_a_model_of_its_own_fits_the_roles_layout() -> None:
    tree = config(reference={"layout": {"tp": 4}}, critic={"layout": {"pp": 4}, "model_path": "values"})
    check_model(tree, HF_CONFIG)
    check_model(tree, HF_CONFIG, "reference")
    with pytest.raises(
        ConfigError, match=r"^reference\.layout\.tp: got 4, .* num_attention_heads=6; valid values: 1, 2$"
    ):
        check_model(tree, HF_CONFIG | {"num_attention_heads": 6}, "reference")
    with pytest.raises(ConfigError, match=r"^critic\.layout: 6 layers do not split over pp=4 stages"):
        check_model(tree, HF_CONFIG, "critic")
    with pytest.raises(ConfigError, match=r"= 128, but the critic has max_position_embeddings=127; shorten one"):
        check_model(tree, HF_CONFIG | {"num_hidden_layers": 4, "max_position_embeddings": 127}, "critic")
    message = r"^critic\.model_path: config\.json has intermediate_size=None, expected a positive int; is it a causal"
    with pytest.raises(ConfigError, match=message):
        check_model(tree, HF_CONFIG | {"intermediate_size": None}, "critic")
