"""Model directories read into specs, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from megarl.data.tiny_model import TinyModelConfig, make_tiny_model
from megarl.errors import ConfigError
from megarl.parallel.weights.families import find_family, read_model_spec

# As published for Qwen3-0.6B.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_published_config(tmp_path: Path) -> None:
    spec = read_model_spec(write_config(tmp_path, QWEN3))
    assert spec.family.name == "qwen3"
    assert (spec.rope_theta, spec.norm_eps, spec.max_positions) == (1e6, 1e-6, 40960)
    tensors = spec.expected_tensors()
    # 11 tensors a layer, the embedding and the last norm.
    assert len(tensors) == 28 * 11 + 2
    assert tensors["model.embed_tokens.weight"] == (151936, 1024)
    assert tensors["model.layers.27.self_attn.q_proj.weight"] == (2048, 1024)
    assert tensors["model.layers.27.self_attn.k_proj.weight"] == (1024, 1024)
    assert tensors["model.layers.27.self_attn.o_proj.weight"] == (1024, 2048)
    assert tensors["model.layers.0.mlp.down_proj.weight"] == (1024, 3072)
    assert tensors["model.layers.0.self_attn.q_norm.weight"] == (128,)


@pytest.mark.parametrize("tied", [True, False])
def test_table_is_what_transformers_writes(tmp_path: Path, tied: bool) -> None:
    sizes = TinyModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=48, tied=tied
    )
    make_tiny_model(tmp_path, sizes, seed=0)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    spec = read_model_spec(tmp_path)
    assert spec.expected_tensors() == written
    assert spec.rope_theta == sizes.rope_theta


def test_older_and_newer_rope_keys(tmp_path: Path) -> None:
    newer = {k: v for k, v in QWEN3.items() if not k.startswith("rope")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert read_model_spec(write_config(tmp_path, newer)).rope_theta == 5e5
    scaled = QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    with pytest.raises(ConfigError, match="rope type 'yarn' is not supported for qwen3"):
        read_model_spec(write_config(tmp_path, scaled))


def test_head_sizes_that_the_config_leaves_out(tmp_path: Path) -> None:
    config = {k: v for k, v in QWEN3.items() if k not in ("head_dim", "num_key_value_heads")}
    dims = read_model_spec(write_config(tmp_path, config)).dims
    assert (dims.head_dim, dims.num_kv_heads) == (64, 16)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_model_spec(tmp_path)
    config = {k: v for k, v in QWEN3.items() if k != "vocab_size"}
    with pytest.raises(ConfigError, match=r"config\.json: key 'vocab_size' is missing"):
        read_model_spec(write_config(tmp_path, config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"rms_norm_eps": "small"}, "a number is of the wrong type"),
    ],
)
def test_settings_that_are_not_supported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_spec(write_config(tmp_path, QWEN3 | changes))


def test_config_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("architectures", [["MambaForCausalLM"], [], None, "Qwen3ForCausalLM"])
def test_unknown_architecture(architectures: object) -> None:
    with pytest.raises(ConfigError, match=r"is not supported; known: \['Qwen3ForCausalLM'"):
        find_family(architectures)


def test_every_parameter_name_has_one_rule(tmp_path: Path) -> None:
    spec = read_model_spec(write_config(tmp_path, QWEN3 | {"tie_word_embeddings": False}))
    assert spec.expected_tensors()["lm_head.weight"] == (151936, 1024)
    names = [name.format(layer=layer) for layer, rule in spec.rules() for name in rule.names]
    assert len(names) == len(set(names)) == len(spec.parameter_rules())
