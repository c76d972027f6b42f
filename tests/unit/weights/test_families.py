"""Model directories read into specs, for every family, and what is refused."""

import ast
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

import megarl
from megarl.errors import ConfigError
from megarl.registry import RegistrationError, noting
from megarl.weights.attention import check_layer_lists, read_local_layers
from megarl.weights.dims import Experts, Routing
from megarl.weights.families import find_family, read_model_spec
from megarl.weights.rope import DefaultRope, LinearRope, Llama3Rope, YarnRope
from megarl.weights.safetensors_headers import check_tensors, not_expected
from megarl.weights.tables import FAMILIES, Family, register_family

CONFIGS = Path(__file__).parents[3] / "configs/model/hf"


def read_published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return config


# Those of whole models, and not of one that is the language model of another.
PLAIN = [family for family in FAMILIES.entries().values() if family.section is None]
DENSE = [family for family in PLAIN if family.expert_ffn_key is None]

LLAMA_3_1_8B = read_published("llama-3.1-8b")
PHI_4 = read_published("phi-4")
GRANITE_3_3_8B = read_published("granite-3.3-8b")
QWEN3_0_6B = read_published("qwen3-0.6b")
DEEPSEEK_V3 = read_published("deepseek-v3")
MISTRAL_SMALL = read_published("mistral-small-24b")
MISTRAL_7B_V01 = read_published("mistral-7b-v0.1")
QWEN1_5_MOE = read_published("qwen1.5-moe-a2.7b")
SEED_OSS_36B = read_published("seed-oss-36b")
GLM_4_5_AIR = read_published("glm-4.5-air")
GLM_4_7_FLASH = read_published("glm-4.7-flash")
QWEN3_NEXT_80B = read_published("qwen3-next-80b-a3b")
# The keys that matter here of such files that are not among them.
MISTRAL_7B_V03 = MISTRAL_7B_V01 | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GRANITE_3_1_3B = read_published("granite-3.1-3b-a800m")
GPT_OSS_20B = read_published("gpt-oss-20b")
QWEN3_30B_A3B = read_published("qwen3-30b-a3b")
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}

# Tied without a word about it.
GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
QWEN3_5_9B = read_published("qwen3.5-9b")
QWEN3_5_35B_TEXT = read_published("qwen3.5-35b-a3b")["text_config"] | {"architectures": ["Qwen3_5MoeForCausalLM"]}
# Its language model, as transformers writes it apart from the tower.
QWEN3_5_9B_TEXT = QWEN3_5_9B["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
PUBLISHED = {
    "gemma": GEMMA_2B,
    "qwen3_5_text": QWEN3_5_9B_TEXT,
    "qwen3_next": QWEN3_NEXT_80B,
    "qwen3_5_moe_text": QWEN3_5_35B_TEXT,
    "seed_oss": SEED_OSS_36B,
    "qwen2_moe": QWEN1_5_MOE,
    "glm4_moe": GLM_4_5_AIR,
    "glm4_moe_lite": GLM_4_7_FLASH,
    "gemma2": read_published("gemma-2-9b"),
    "gemma3_text": read_published("gemma-3-1b"),
    "olmo2": read_published("olmo-2-7b"),
    "olmo3": read_published("olmo-3-7b"),
    "llama": LLAMA_3_1_8B,
    "mistral": MISTRAL_7B_V03,
    "phi3": PHI_4,
    "granite": GRANITE_3_3_8B,
    "qwen2": QWEN2_5_7B,
    "qwen3": QWEN3_0_6B,
    "qwen3_moe": QWEN3_30B_A3B,
    "mixtral": MIXTRAL_8X7B,
    "minimax_m2": read_published("minimax-m2"),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS_20B,
    "granitemoe": GRANITE_3_1_3B,
}
# What no family can do without.
ESSENTIAL = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
LATENT_KEYS = (
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
EXPERT_KEYS = {
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "qwen3_5_moe_text": (
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "shared_expert_intermediate_size",
    ),
    "qwen3_next": (
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "shared_expert_intermediate_size",
    ),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "glm4_moe_lite": (*LATENT_KEYS, "routed_scaling_factor"),
    "deepseek_v2": LATENT_KEYS,
    "deepseek_v3": (*LATENT_KEYS, "routed_scaling_factor"),
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok"),
    "granitemoe": ("num_local_experts", "num_experts_per_tok"),
    "minimax_m2": ("num_local_experts", "num_experts_per_tok"),
}
# Keys of published files that transformers does not read, or not under this name.
UNREAD = {
    "gemma2": {"sliding_window_pattern"},
    "gemma3_text": {"sliding_window_pattern", "rope_theta", "rope_local_base_freq"},
    # No layer is dense.
    "qwen3_5_moe_text": {"intermediate_size"},
    "olmo2": {"qk_norm_type"},
    "olmo3": {"qk_norm_type", "sliding_window_pattern"},
    "minimax_m2": {
        "n_group",
        "partial_rotary_factor",
        "qk_norm_type",
        "routed_scaling_factor",
        "scoring_func",
        "topk_group",
        "use_qk_norm",
        "use_routing_bias",
    },
}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


COUNTS = {
    # As the models' pages count them.
    "llama-3.1-8b": (LLAMA_3_1_8B, 8_030_261_248),
    "mistral-7b-v0.3": (MISTRAL_7B_V03, 7_248_023_552),
    "mistral-small": (MISTRAL_SMALL, 23_572_403_200),
    "phi-4": (PHI_4, 14_659_507_200),
    "granite-3.3-8b": (GRANITE_3_3_8B, 8_170_864_640),
    "qwen2.5-7b": (QWEN2_5_7B, 7_615_616_512),
    "qwen3-0.6b": (QWEN3_0_6B, 596_049_920),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, 30_532_122_624),
    "mixtral-8x7b": (MIXTRAL_8X7B, 46_702_792_704),
    # With 58 biases of 256 experts.
    "deepseek-v3": (DEEPSEEK_V3, 671_026_404_352 + 58 * 256),
    "deepseek-v2": (DEEPSEEK_V2, 235_741_434_880),
    "gemma-2b": (GEMMA_2B, 2_506_172_416),
    "qwen1.5-moe-a2.7b": (QWEN1_5_MOE, 14_315_784_192),
    "seed-oss-36b": (SEED_OSS_36B, 36_151_104_512),
    # With 45 biases of 128 experts, without the layer that predicts one token further.
    "glm-4.5-air": (GLM_4_5_AIR, 106_852_245_504 + 45 * 128),
    # With 46 biases of 64 experts.
    "glm-4.7-flash": (GLM_4_7_FLASH, 29_943_390_976 + 46 * 64),
    # As 20.91 billions in the model's card.
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "granite-3.1-3b-a800m": (GRANITE_3_1_3B, 3_298_793_472),
}


@pytest.mark.parametrize(("config", "num_parameters"), COUNTS.values(), ids=COUNTS)
def test_published_models(tmp_path: Path, config: dict[str, Any], num_parameters: int) -> None:
    spec = read_model_spec(write_config(tmp_path, config))
    assert sum(math.prod(shape) for shape in spec.expected_tensors().values()) == num_parameters
    assert spec.rope_theta == config["rope_theta"]
    assert spec.norm_eps == config["rms_norm_eps"]
    assert spec.max_positions == config["max_position_embeddings"]


def test_published_shapes(tmp_path: Path) -> None:
    spec = read_model_spec(write_config(tmp_path, QWEN3_0_6B))
    tensors = spec.expected_tensors()
    # 11 tensors a layer, the embedding and the last norm.
    assert len(tensors) == 28 * 11 + 2
    assert tensors["model.embed_tokens.weight"] == (151936, 1024)
    assert tensors["model.layers.27.self_attn.q_proj.weight"] == (2048, 1024)
    assert tensors["model.layers.27.self_attn.k_proj.weight"] == (1024, 1024)
    assert tensors["model.layers.27.self_attn.o_proj.weight"] == (1024, 2048)
    assert tensors["model.layers.0.mlp.down_proj.weight"] == (1024, 3072)
    assert tensors["model.layers.0.self_attn.q_norm.weight"] == (128,)


@pytest.mark.parametrize("family", DENSE, ids=lambda family: family.name)
def test_table_is_what_transformers_has(tmp_path: Path, family: Family) -> None:
    small = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "vocab_size": 517,
    }
    hf_config = transformers.AutoConfig.for_model(family.name, **small, architectures=list(family.architectures))
    hf_config.sliding_window = None
    hf_config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config)
    assert type(model).__name__ in family.architectures
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert read_model_spec(tmp_path).expected_tensors() == expected


@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
def test_left_out_keys_mean_what_they_mean_to_transformers(tmp_path: Path, family: Family) -> None:
    published = PUBLISHED[family.name]
    # As many positions as Mistral's window has by default.
    essential = (*ESSENTIAL, *EXPERT_KEYS[family.name]) if family.expert_ffn_key else ESSENTIAL
    config = {key: published[key] for key in essential if key in published}
    config |= {"num_attention_heads": 64, "max_position_embeddings": 4096}
    hf = transformers.AutoConfig.from_pretrained(write_config(tmp_path, config))
    spec = read_model_spec(tmp_path)
    if spec.dims.latent is None:
        assert spec.dims.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // 64)
    assert spec.dims.num_kv_heads == hf.num_key_value_heads
    assert spec.dims.tied == hf.tie_word_embeddings
    rope = hf.rope_parameters
    assert spec.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    if spec.local_rope is not None:
        assert spec.local_rope.theta == rope["sliding_attention"]["rope_theta"]
    if "sliding_window_pattern" in family.defaults:
        assert list(read_local_layers(spec.hf_config)) == [kind == "sliding_attention" for kind in hf.layer_types]
    required = {key: values[0] for key, values in family.required.items()}
    # Lists of layers have taken the places of the pattern and of the first layer with experts.
    first = {"first_k_dense_replace": hf.mlp_layer_types.index("sparse")} if hasattr(hf, "mlp_layer_types") else {}
    for key, value in (*family.defaults.items(), *required.items()):
        if key not in UNREAD.get(family.name, {"sliding_window_pattern"}):
            # Transformers moves defaults of the rotary embedding there.
            own = {} if key == "rope_theta" else rope | first
            assert own.get(key, getattr(type(hf), {"rope_theta": "default_theta"}.get(key, key), None)) == value


SMALL_EXPERTS = {
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_attention_heads": 6,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "vocab_size": 517,
    "num_experts_per_tok": 3,
}
LATENT_SMALL = {
    "first_k_dense_replace": 2,
    "kv_lora_rank": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
DEEPSEEK_SMALL = {**LATENT_SMALL, "n_group": 1, "num_mtp_layers": 0, "topk_group": 1}
ONE_GROUP = {"num_groups": 1, "groups_per_token": 1}
ROUTINGS = {
    "deepseek_v2": Routing(**ONE_GROUP, group_rating=1, scale=1.0, biased=False),
    "deepseek_v3": Routing(**ONE_GROUP, group_rating=2, scale=2.5, biased=True),
    "glm4_moe": Routing(**ONE_GROUP, group_rating=2, scale=1.0, biased=True),
}
QWEN3_SMALL = {"num_experts": 5, "moe_intermediate_size": 16, "head_dim": 8}
QWEN2_SMALL = {"num_experts": 5, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
GLM4_SMALL = {"n_routed_experts": 5, "moe_intermediate_size": 16, "n_shared_experts": 2, "num_mtp_layers": 0}


LAYERS_WITH_EXPERTS = {
    "qwen3_moe": ("qwen3_moe", QWEN3_SMALL, (0, 1, 2, 3, 4)),
    # Every second layer, 1 and 3, but for layer 3.
    "qwen3_moe-mixed": ("qwen3_moe", {**QWEN3_SMALL, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
    "qwen2_moe": ("qwen2_moe", {**QWEN2_SMALL, "decoder_sparse_step": 2}, (1, 3)),
    "qwen2_moe-without-biases": ("qwen2_moe", {**QWEN2_SMALL, "qkv_bias": False}, (0, 1, 2, 3, 4)),
    "qwen3_next": ("qwen3_next", {**QWEN2_SMALL, "mlp_only_layers": [2]}, (0, 1, 3, 4)),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN2_SMALL, (0, 1, 2, 3, 4)),
    "glm4_moe": ("glm4_moe", GLM4_SMALL, (1, 2, 3, 4)),
    "glm4_moe-biases": ("glm4_moe", {**GLM4_SMALL, "attention_bias": True}, (1, 2, 3, 4)),
    "glm4_moe-norms": ("glm4_moe", {**GLM4_SMALL, "use_qk_norm": True}, (1, 2, 3, 4)),
    "mixtral": ("mixtral", {"num_local_experts": 5}, (0, 1, 2, 3, 4)),
    "deepseek_v2": ("deepseek_v2", LATENT_SMALL, (2, 3, 4)),
    "deepseek_v2-lite": ("deepseek_v2", {**LATENT_SMALL, "q_lora_rank": None}, (2, 3, 4)),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_SMALL, (2, 3, 4)),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 5, "head_dim": 8}, (0, 1, 2, 3, 4)),
    "granitemoe": ("granitemoe", {"num_local_experts": 5}, (0, 1, 2, 3, 4)),
}


@pytest.mark.parametrize(("model_type", "keys", "layers"), LAYERS_WITH_EXPERTS.values(), ids=LAYERS_WITH_EXPERTS)
def test_experts_are_what_transformers_writes(
    tmp_path: Path, model_type: str, keys: dict[str, Any], layers: tuple[int, ...]
) -> None:
    """Compared with the files: in memory transformers holds all experts of a layer in one tensor."""
    family = FAMILIES.get(model_type)
    config = transformers.AutoConfig.for_model(
        model_type, **{**SMALL_EXPERTS, **keys}, architectures=list(family.architectures)
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    spec = read_model_spec(tmp_path)
    width = 24 if model_type in ("mixtral", "gpt_oss", "granitemoe") else 16
    assert spec.expected_tensors() == expected
    routing = ROUTINGS.get(model_type)
    assert spec.dims.experts == Experts(
        num=5,
        per_token=3,
        ffn=width,
        normalized=model_type
        in ("mixtral", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "granitemoe"),
        layers=layers,
        shared_ffn=32 if routing or "shared_expert_intermediate_size" in keys else 0,
        gates_shared="shared_expert_intermediate_size" in keys,
        routing=routing,
    )


def test_qwen3_5_as_published(tmp_path: Path) -> None:
    """The sizes are those of its language model, whose tensors have a prefix; the tower and MTP layers stay."""
    spec = read_model_spec(write_config(tmp_path, QWEN3_5_9B))
    assert spec.family.name == "qwen3_5"
    (tmp_path / "text").mkdir()
    plain = read_model_spec(write_config(tmp_path / "text", QWEN3_5_9B_TEXT))
    assert spec.dims == plain.dims
    assert spec.dims.rotary_fraction == 0.25
    assert spec.dims.delta is not None
    assert spec.dims.delta.layers == {layer for layer in range(32) if layer % 4 != 3}
    names = {name.replace("model.language_model.", "model."): shape for name, shape in spec.expected_tensors().items()}
    assert names == plain.expected_tensors()
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in spec.expected_tensors()
    assert "lm_head.weight" in spec.expected_tensors()
    found = [*spec.expected_tensors(), "model.visual.blocks.0.norm1.weight", "mtp.norm.weight", "model.other.weight"]
    assert not_expected(found, spec.expected_tensors(), spec.ignored_tensors()) == ["model.other.weight"]


def test_experts_of_qwen3_5_as_published() -> None:
    """All of a layer in one tensor, in which gates come before ups; engines take each matrix of each by its name."""
    spec = read_model_spec(CONFIGS / "qwen3.5-35b-a3b")
    layer = "model.language_model.layers.39.mlp"
    whole, apart = spec.expected_tensors(), spec.expected_tensors(by_expert=True)
    assert whole[f"{layer}.experts.gate_up_proj"] == (256, 2 * 512, 2048)
    assert whole[f"{layer}.experts.down_proj"] == (256, 2048, 512)
    assert f"{layer}.experts.0.gate_proj.weight" not in whole
    assert {apart[f"{layer}.experts.255.{name}_proj.weight"] for name in ("gate", "up")} == {(512, 2048)}
    assert apart[f"{layer}.experts.255.down_proj.weight"] == (2048, 512)
    assert f"{layer}.experts.gate_up_proj" not in apart
    assert sum(map(math.prod, whole.values())) == sum(map(math.prod, apart.values()))
    assert whole[f"{layer}.shared_expert_gate.weight"] == (1, 2048)
    # No layer is dense.
    assert not [name for name in whole if name.endswith(".mlp.gate_proj.weight")]


def test_gemma_3_27b_as_published(tmp_path: Path) -> None:
    """Its file leaves out what equals the defaults of transformers."""
    published = read_published("gemma-3-27b")
    spec = read_model_spec(write_config(tmp_path, published))
    text = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    dims = spec.dims
    assert (dims.num_heads, dims.num_kv_heads, dims.vocab, dims.head_dim, dims.tied) == (32, 16, 262208, 128, True)
    assert dims.vocab == text.vocab_size
    assert (spec.max_positions, spec.norm_eps) == (text.max_position_embeddings, text.rms_norm_eps)
    assert dims.windows == tuple(1024 if kind == "sliding_attention" else None for kind in text.layer_types)
    assert spec.score_scale == 168**-0.5
    assert spec.rope_scaling == LinearRope(factor=8.0)
    assert spec.local_rope is not None
    assert (spec.rope_theta, spec.local_rope.theta) == (1e6, 1e4)
    assert "language_model.model.layers.61.pre_feedforward_layernorm.weight" in spec.expected_tensors()
    found = [*spec.expected_tensors(), "vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.x"]
    assert not not_expected(found, spec.expected_tensors(), spec.ignored_tensors())
    smaller = published | {"text_config": without(published["text_config"], "num_attention_heads")}
    assert read_model_spec(write_config(tmp_path, smaller)).dims.num_heads == 8


def test_mistral_small_as_published(tmp_path: Path) -> None:
    """All tensors of the language model have a prefix, its output embedding too."""
    (tmp_path / "text").mkdir()
    changes = {"max_position_embeddings": 131072, "rope_theta": 1000000000.0}
    plain = read_model_spec(write_config(tmp_path / "text", MISTRAL_SMALL | changes))
    spec = read_model_spec(CONFIGS / "mistral-small-3.2-24b")
    assert (spec.dims, spec.rope_theta, spec.norm_eps) == (plain.dims, plain.rope_theta, plain.norm_eps)
    assert list(spec.expected_tensors()) == [f"language_model.{name}" for name in plain.expected_tensors()]
    found = [*spec.expected_tensors(), "vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"]
    assert not not_expected(found, spec.expected_tensors(), spec.ignored_tensors())


def test_the_larger_model_says_whether_embeddings_are_tied(tmp_path: Path) -> None:
    section = {key: value for key, value in QWEN3_5_9B["text_config"].items() if key != "tie_word_embeddings"}
    whole = QWEN3_5_9B | {"tie_word_embeddings": True, "text_config": section}
    spec = read_model_spec(write_config(tmp_path, whole))
    assert spec.dims.tied
    assert "lm_head.weight" not in spec.expected_tensors()
    # Engines read the section.
    with pytest.raises(ConfigError, match=r"text_config\.tie_word_embeddings: got False, but tie_word_embeddings says"):
        read_model_spec(write_config(tmp_path, whole | {"text_config": section | {"tie_word_embeddings": False}}))


def test_deepseek_v3_as_published(tmp_path: Path) -> None:
    spec = read_model_spec(write_config(tmp_path, DEEPSEEK_V3))
    assert spec.rope_scaling == YarnRope(
        factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0
    )
    assert spec.float32_tensors() == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(3, 61)}
    # A layer that predicts one token further is in the files, and nothing reads it.
    ignored = spec.ignored_tensors()
    assert {
        "model.layers.61.eh_proj.weight",
        "model.layers.61.enorm.weight",
        "model.layers.61.shared_head.head.weight",
        "model.layers.61.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.61.mlp.experts.255.down_proj.weight",
        "model.layers.61.mlp.gate.e_score_correction_bias",
    } <= set(ignored)
    assert len(ignored) == len(set(ignored))
    assert not set(ignored) & spec.expected_tensors().keys()
    for change, message in (
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok: got 129, expected at most 128, the experts in topk_gr"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: got .*not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope type 'linear' is not supported; known: .*'yarn'"),
        ({"model_type": "kimi_k2"}, r"model_type: got 'kimi_k2', expected 'deepseek_v3'; change it in the file"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_model_spec(write_config(tmp_path, DEEPSEEK_V3 | change))


def test_glm_as_published(tmp_path: Path) -> None:
    """GLM-4.5-Air has biases, larger models also norms of queries and keys, and all a layer that predicts further."""
    air = read_model_spec(write_config(tmp_path, GLM_4_5_AIR))
    assert (air.dims.rotary_fraction, air.dims.qkv_bias, air.dims.qk_norm) == (0.5, True, False)
    larger = read_model_spec(write_config(tmp_path, GLM_4_5_AIR | {"use_qk_norm": True}))
    more = larger.expected_tensors().keys() - air.expected_tensors().keys()
    assert more == {f"model.layers.{i}.self_attn.{name}_norm.weight" for i in range(46) for name in "qk"}
    ignored = {"model.layers.46.eh_proj.weight", "model.layers.46.mlp.experts.127.down_proj.weight"}
    assert ignored < set(air.ignored_tensors())
    assert air.float32_tensors() == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(1, 46)}


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    """Windows in every second layer, scores times (0.1·ln 32 + 1)² / √64, and MXFP4 refused with its remedy."""
    spec = read_model_spec(write_config(tmp_path, GPT_OSS_20B))
    assert spec.dims.windows == (128, None) * 12
    assert spec.softmax_scale == pytest.approx((0.1 * math.log(32) + 1) ** 2 / 8)
    every, each = "model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.31.gate_up_proj"
    assert spec.expected_tensors()[every] == (32, 2880, 5760)
    assert spec.expected_tensors(by_expert=True)[each] == (2880, 5760)
    assert each not in spec.expected_tensors()
    assert every not in spec.expected_tensors(by_expert=True)
    message = rf"quantization_config: got quant_method 'mxfp4', .*`megarl convert dequantize {tmp_path} --out DIR`"
    with pytest.raises(ConfigError, match=message):
        read_model_spec(write_config(tmp_path, GPT_OSS_20B | {"quantization_config": {"quant_method": "mxfp4"}}))


def test_deepseek_v2_as_published(tmp_path: Path) -> None:
    spec = read_model_spec(write_config(tmp_path, DEEPSEEK_V2))
    assert spec.dims.experts is not None
    assert spec.dims.experts.routing == Routing(
        num_groups=8, groups_per_token=3, group_rating=1, scale=16.0, biased=False
    )
    assert not spec.dims.experts.normalized
    assert spec.float32_tensors() == frozenset()
    queries = "model.layers.0.self_attn.q"
    assert {f"{queries}_a_proj.weight", f"{queries}_b_proj.weight"} < spec.expected_tensors().keys()
    assert f"{queries}_proj.weight" not in spec.expected_tensors()

    lite = read_model_spec(write_config(tmp_path, DEEPSEEK_V2_LITE))
    tensors = lite.expected_tensors()
    # 16 heads of 128 + 64.
    assert tensors[f"{queries}_proj.weight"] == (3072, 2048)
    assert not [name for name in tensors if ".q_a_" in name or ".q_b_" in name]
    assert lite.dims.experts is not None
    assert lite.dims.experts.routing == Routing(**ONE_GROUP, group_rating=1, scale=1.0, biased=False)
    for change, message in (
        ({"norm_topk_prob": True}, r"norm_topk_prob: got True, expected False; other variants of deepseek_v2"),
        ({"topk_method": "noaux_tc"}, r"topk_method: got 'noaux_tc', expected 'greedy' or 'group_limited_greedy'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_model_spec(write_config(tmp_path, DEEPSEEK_V2 | change))


def test_a_rank_numbers_its_experts_from_0() -> None:
    spec = read_model_spec(CONFIGS / "qwen3-30b-a3b")
    rules = spec.parameter_rules(experts=range(32, 48))
    assert len(rules) == len(spec.parameter_rules(experts=range(16)))
    placed = rules["decoder.layers.47.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert placed is rules["decoder.layers.47.mlp.experts.linear_fc1.weight3"]
    assert [placed.name(tensor.name) for tensor in placed.rule.tensors] == [
        "model.layers.47.mlp.experts.35.gate_proj.weight",
        "model.layers.47.mlp.experts.35.up_proj.weight",
    ]
    assert "decoder.layers.47.mlp.experts.local_experts.16.linear_fc1.weight" not in rules


def test_bias_of_attention(tmp_path: Path) -> None:
    """Queries, keys and values have one bias in Megatron; it is split as their weight is."""
    rules = read_model_spec(write_config(tmp_path, QWEN2_5_7B)).parameter_rules()
    bias = rules["decoder.layers.27.self_attention.linear_qkv.bias"]
    assert bias.layer == 27
    assert bias.rule.partition == rules["decoder.layers.27.self_attention.linear_qkv.weight"].rule.partition
    assert [tensor.name for tensor in bias.rule.tensors] == [
        "model.layers.{layer}.self_attn.q_proj.bias",
        "model.layers.{layer}.self_attn.k_proj.bias",
        "model.layers.{layer}.self_attn.v_proj.bias",
    ]
    for other in (LLAMA_3_1_8B, MISTRAL_7B_V03, QWEN3_0_6B):
        names = read_model_spec(write_config(tmp_path, other)).parameter_rules()
        assert not [name for name in names if name.endswith("bias")]


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "qwen3_5_text", "granitemoe"])
def test_every_parameter_name_has_one_rule(tmp_path: Path, name: str) -> None:
    config = PUBLISHED[name]
    spec = read_model_spec(write_config(tmp_path, config | {"tie_word_embeddings": False}))
    assert spec.expected_tensors()["lm_head.weight"] == (config["vocab_size"], config["hidden_size"])
    names = [placed.name(name) for placed in spec.rules() for name in placed.rule.names]
    assert len(names) == len(set(names)) == len(spec.parameter_rules())
    # By the local layers and by Transformer Engine's.
    first = "in_proj" if spec.dims.delta is not None else "linear_qkv"
    before = {
        "decoder.layers.0.input_layernorm.weight",
        f"decoder.layers.0.self_attention.{first}.layer_norm_weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    }
    after = {"decoder.layers.0.self_attn_bda.weight", "decoder.layers.0.mlp_bda.weight"}
    assert before & set(names) == (before if spec.family.norms_before else set())
    assert after & set(names) == (after if spec.family.norms_after else set())


def test_rope_of_older_and_newer_files(tmp_path: Path) -> None:
    spec = read_model_spec(write_config(tmp_path, LLAMA_3_1_8B))
    scaling = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    assert (spec.rope_theta, spec.rope_scaling) == (500000.0, scaling)
    newer = without(LLAMA_3_1_8B, "rope_theta", "rope_scaling")
    newer["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}  # type: ignore[dict-item]
    spec = read_model_spec(write_config(tmp_path, newer))
    assert (spec.rope_theta, spec.rope_scaling) == (500000.0, scaling)

    linear = LLAMA_3_1_8B | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read_model_spec(write_config(tmp_path, linear)).rope_scaling == LinearRope(factor=4.0)
    assert read_model_spec(write_config(tmp_path, QWEN3_0_6B)).rope_scaling == DefaultRope()
    neither = without(QWEN3_0_6B, "rope_theta", "rope_scaling")
    assert read_model_spec(write_config(tmp_path, neither)).rope_theta == 10000.0


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL_7B_V03 | {"sliding_window": 4096},
        without(MISTRAL_7B_V03, "sliding_window"),
        QWEN2_5_7B | {"sliding_window": 4096, "use_sliding_window": True},
        QWEN2_5_7B | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5},
        without(QWEN3_0_6B, "sliding_window", "max_window_layers") | {"use_sliding_window": True},
        QWEN3_0_6B | {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 28},
    ],
    ids=["mistral", "mistral-by-default", "qwen2", "qwen2-later", "qwen3-by-default", "qwen3-types"],
)
def test_windows_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    """In Mistral all layers have them, though transformers does not list their types."""
    windows = read_model_spec(write_config(tmp_path, config)).dims.windows
    hf = transformers.AutoConfig.from_pretrained(tmp_path)
    types = getattr(hf, "layer_types", ["sliding_attention"] * hf.num_hidden_layers)
    expected = tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in types)
    assert windows == (expected if any(expected) else ())


def test_options_are_refused_where_models_have_none(tmp_path: Path) -> None:
    for changes in ({"sliding_window": 4096}, {"partial_rotary_factor": 0.5}, {"residual_multiplier": 0.5}):
        (key,) = changes
        message = rf"config\.json: {key}: got .*but llama models have no such option; remove the key"
        with pytest.raises(ConfigError, match=message):
            read_model_spec(write_config(tmp_path, LLAMA_3_1_8B | changes))


SPARSE, FULL = ["sparse"] * 61, "full_attention"


@pytest.mark.parametrize(
    ("config", "key", "right", "wrong", "expected"),
    [
        (QWEN3_0_6B, "layer_types", [FULL] * 28, ["linear_attention"] + [FULL] * 27, FULL),
        (QWEN3_0_6B, "layer_types", None, [FULL] * 29, "num_hidden_layers=28"),
        (QWEN3_0_6B, "layer_types", None, [], "num_hidden_layers=28"),
        (QWEN3_0_6B, "layer_types", None, FULL, "num_hidden_layers=28"),
        (QWEN3_0_6B, "layer_types", None, ["sliding_attention"] * 28, FULL),
        (MISTRAL_7B_V03, "layer_types", ["sliding_attention"] * 32, ["chunked_attention"] * 32, "or sliding_attention"),
        (LLAMA_3_1_8B, "layer_types", [FULL] * 32, [FULL] * 31 + [{}], FULL),
        (LLAMA_3_1_8B, "layers_block_type", ["attention"] * 32, ["mamba"] * 32, "attention or full_attention"),
        (LLAMA_3_1_8B, "no_rope_layers", [1] * 32, [1, 1, 1, 0] * 8, "1"),
        (LLAMA_3_1_8B, "mlp_layer_types", ["dense"] * 32, ["sparse"] * 32, "dense"),
        (LLAMA_3_1_8B, "kv_shared_layers", [], [7], "none"),
        (QWEN3_NEXT_80B, "layer_types", None, (["linear_attention"] * 3 + [FULL]) * 11, "num_hidden_layers=48"),
        (without(QWEN3_NEXT_80B, "full_attention_interval"), "layer_types", None, ["sliding_attention"] * 48,
         f"{FULL} or linear_attention"),
        (QWEN3_30B_A3B, "mlp_only_layers", [0, 47], [48], "none"),
        (QWEN3_30B_A3B, "mlp_layer_types", ["sparse"] * 48, ["dense"] + ["sparse"] * 47, "different ones"),
        (MIXTRAL_8X7B, "mlp_only_layers", [], [3], "none"),
        (MIXTRAL_8X7B, "moe_layer_freq", [1] * 32, [0] + [1] * 31, "different ones"),
        (PUBLISHED["minimax_m2"], "attn_type_list", [1] * 62, [1] * 61 + [0], "1"),
        (DEEPSEEK_V3, "mlp_layer_types", ["dense"] * 3 + SPARSE[3:], ["dense"] * 4 + SPARSE[4:], "different ones"),
        (DEEPSEEK_V3, "mlp_layer_types", None, ["dense"] * 3 + SPARSE, "different ones"),
    ],
)  # fmt: skip
def test_lists_over_layers_have_one_that_the_family_builds_for_each(
    config: dict[str, Any], key: str, right: object, wrong: object, expected: str, tmp_path: Path
) -> None:
    read_model_spec(write_config(tmp_path, config | {key: right}))
    with pytest.raises(ConfigError, match=rf"{key}.*(expected|read) .*{re.escape(expected)}"):
        read_model_spec(write_config(tmp_path, config | {key: wrong}))


@pytest.mark.parametrize("family", FAMILIES.entries().values(), ids=lambda family: family.name)
def test_lists_over_layers_that_transformers_writes_are_read(family: Family) -> None:
    """Those of a configuration that save_pretrained writes, and those that its classes declare."""
    names = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    types = {kind for each in names for kind, name in each.items() if name in family.architectures}
    assert types
    for whole in (transformers.CONFIG_MAPPING[kind]() for kind in types):
        written, text = whole.to_dict(), whole.get_text_config()
        config = {**family.defaults, **text.to_dict(), **written}
        kinds = [kind for cls in {type(whole), type(text)} for kind in cls.__annotations__.items()]
        declared = {name for name, kind in kinds if "layer" in name and "list" in str(kind)}
        assert declared <= {"layer_types", "mlp_layer_types", "mlp_only_layers", "vision_feature_layer"}
        check_layer_lists(Path("config.json"), family, config)
        if "vision_feature_layer" in declared:
            check_layer_lists(Path("config.json"), family, config | {"vision_feature_layer": [-2, -1]})


def test_windows_that_never_close_are_accepted(tmp_path: Path) -> None:
    for config in (
        MISTRAL_7B_V03 | {"sliding_window": 32768},
        QWEN2_5_7B | {"use_sliding_window": True},
        without(QWEN2_5_7B, "use_sliding_window") | {"sliding_window": 4096},
    ):
        assert read_model_spec(write_config(tmp_path, config)).max_positions == config["max_position_embeddings"]


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LLAMA_3_1_8B, "attention_bias", True),
        (LLAMA_3_1_8B, "mlp_bias", True),
        (QWEN3_0_6B, "attention_bias", True),
        (GEMMA_2B, "use_bidirectional_attention", True),
        (QWEN3_30B_A3B, "use_sliding_window", True),
        *((config, "hidden_act", "relu") for config in PUBLISHED.values() if "hidden_activation" not in config),
        *((config, "hidden_activation", "relu") for config in PUBLISHED.values() if "hidden_activation" in config),
        (PUBLISHED["gemma3_text"], "attn_logit_softcapping", 50.0),
        (PUBLISHED["minimax_m2"], "qk_norm_type", "per_head"),
    ],
)
def test_variants_of_a_family_are_refused(tmp_path: Path, config: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {key}: got {value!r}, expected .*not supported"):
        read_model_spec(write_config(tmp_path, config | {key: value}))


@pytest.mark.parametrize("key", without(dict.fromkeys(ESSENTIAL), "architectures", "model_type"))
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: key '{key}' is missing; it is needed for a llama model"):
        read_model_spec(write_config(tmp_path, without(LLAMA_3_1_8B, key)))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        read_model_spec(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: a number is of the wrong type"):
        read_model_spec(write_config(tmp_path, QWEN3_0_6B | {"rms_norm_eps": "small"}))


@pytest.mark.parametrize(
    "architectures", [["MambaForCausalLM"], ["PaliGemmaForConditionalGeneration"], [], None, "Qwen3ForCausalLM"]
)
def test_unknown_architecture(architectures: object) -> None:
    message = r"is not supported; known: \['DeepseekV2ForCausalLM', 'DeepseekV3ForCausalLM', 'Gemma"
    with pytest.raises(ConfigError, match=message):
        find_family(architectures)


def test_architectures_that_are_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match=r"'Ministral3ForCausalLM'\] is not supported: vLLM does not scale"):
        find_family(["Ministral3ForCausalLM"])


def test_tensors_that_nothing_reads(tmp_path: Path) -> None:
    """Early Llama checkpoints carry their rotary frequencies, tied ones may carry the output head."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 8, "tie_word_embeddings": True}
    spec = read_model_spec(write_config(tmp_path, LLAMA_3_1_8B | small))
    tensors = {name: torch.zeros(shape) for name, shape in spec.expected_tensors().items()}
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(1) for layer in range(2)}
    ignored = {"lm_head.weight": torch.zeros(8, 64), **buffers}
    assert set(spec.ignored_tensors()) == set(ignored)
    save_file(tensors | ignored, tmp_path / "model.safetensors")
    check_tensors(tmp_path, spec.expected_tensors(), ignored=spec.ignored_tensors())

    untied = read_model_spec(write_config(tmp_path, LLAMA_3_1_8B | small | {"tie_word_embeddings": False}))
    assert set(untied.ignored_tensors()) == set(buffers)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "equal", "differing"),
    [
        (QWEN3_0_6B, {"rope_scaling": PLAIN_ROPE, "rope_parameters": PLAIN_ROPE}, {"rope_scaling": YARN}),
        (QWEN3_0_6B, {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
         {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}),
        (QWEN3_0_6B, {"rope_theta": 1e6, "rope_parameters": PLAIN_ROPE}, {"rope_theta": 5e5}),
        (QWEN3_0_6B, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}),
        (MIXTRAL_8X7B, {"num_experts": 8}, {"num_experts": 4}),
        (MIXTRAL_8X7B, {"experts_per_token": 2}, {"experts_per_token": 1}),
        (MIXTRAL_8X7B, {"moe_num_experts": 8, "moe_topk": 2}, {"moe_topk": 1}),
        (QWEN3_0_6B, {"num_kv_heads": 8}, {"num_kv_heads": 16}),
        (QWEN3_0_6B, {"n_head_kv": None, "multi_query_group_num": 8}, {"n_head_kv": 16}),
        (PUBLISHED["gemma2"],
         {"layer_types": ["sliding_attention", "full_attention"] * 21, "sliding_window_pattern": 2},
         {"sliding_window_pattern": 3}),
        (QWEN3_NEXT_80B, {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
                          "full_attention_interval": 4}, {"full_attention_interval": 2}),
        (DEEPSEEK_V3, {"moe_layer_freq": 1}, {"moe_layer_freq": 2}),
        (DEEPSEEK_V3, {"moe_layer_freq": [0] * 3 + [1] * 58}, {"moe_layer_freq": [0] * 4 + [1] * 57}),
        (QWEN3_30B_A3B, {"moe_layer_freq": 1}, {"decoder_sparse_step": 2}),
    ],
)  # fmt: skip
def test_keys_that_say_the_same_are_compared(
    config: dict[str, Any], equal: dict[str, Any], differing: dict[str, Any], tmp_path: Path
) -> None:
    for missing in ({}, *({key: None} for key in equal if key != "full_attention_interval")):
        read_model_spec(write_config(tmp_path, config | equal | missing))
    with pytest.raises(ConfigError, match="trainer and engines would read different ones"):
        read_model_spec(write_config(tmp_path, config | equal | differing))


def test_a_family_of_a_user() -> None:
    own = replace(FAMILIES.get("llama"), name="own", architectures=("OwnForCausalLM",))
    with noting() as noted:
        assert register_family(own) is own
    try:
        assert find_family(["OwnForCausalLM"]) is own
        assert find_family(["OwnForSequenceClassification"]) is own
        with pytest.raises(
            RegistrationError, match="model family 'own': has the architecture OwnForCausalLM, which own"
        ):
            register_family(own)
    finally:
        noted[0].undo()
    with pytest.raises(ConfigError, match=r"OwnForCausalLM.* is not supported"):
        find_family(["OwnForCausalLM"])


def test_no_other_code_knows_the_name_of_a_model() -> None:
    """`parsers.py` names the formats of tool calls, and `tiny_model.py` writes a model."""
    known, package = set(FAMILIES), Path(megarl.__file__).parent
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    found = {
        path.name
        for path, text in texts.items()
        if not path.name.endswith(("_families.py", "parsers.py", "tiny_model.py"))
        # Few files have the text of a name at all, and need not be parsed otherwise.
        if any(f'"{name}"' in text for name in known)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known
    }
    assert found == set()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_beside_tied_embeddings_must_be_equal(tied: bool, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 8, "tie_word_embeddings": tied}
    spec = read_model_spec(write_config(tmp_path, LLAMA_3_1_8B | small))
    tensors = {name: torch.zeros(shape) for name, shape in spec.expected_tensors().items()}
    for head in (torch.zeros(8, 64), torch.ones(8, 64)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
        if tied and head.any():
            with pytest.raises(ConfigError, match=r"set tie_word_embeddings to false in config\.json, else remove"):
                check_tensors(tmp_path, spec.expected_tensors(), ignored=spec.ignored_tensors(), copies=spec.copies())
        else:
            check_tensors(tmp_path, spec.expected_tensors(), ignored=spec.ignored_tensors(), copies=spec.copies())
