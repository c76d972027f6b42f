"""Small models of every family as transformers writes them, with sizes that no layout divides evenly."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

VOCAB_SIZE = 517
# 517 is prime. Six query heads share two key/value heads; five layers are 3 + 2.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModel:
    """The name of a transformers config, and changes to the config.json it writes: keys set, and keys left out."""

    config: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


# With θ = 10000 and 8 dimensions the wavelengths are 6, 63, 628, …: below 64/4, between, and above 64/1.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOWS = {"sliding_window": 7, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING]}
_MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
}
DENSE = {
    # As older versions of transformers wrote it.
    "llama": HFModel(
        config="LlamaConfig",
        keys={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        written={"rope_theta": 500.0, "rope_scaling": None},
        left_out=("head_dim", "rope_parameters"),
    ),
    "llama-3": HFModel(config="LlamaConfig", keys={"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear": HFModel(
        config="LlamaConfig",
        keys={"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        written={"rope_scaling": {"type": "linear", "factor": 4.0}},
        left_out=("head_dim", "rope_parameters"),
    ),
    "mistral": HFModel(config="MistralConfig", keys={"sliding_window": None}, left_out=("head_dim",)),
    "qwen2": HFModel(config="Qwen2Config"),
    "qwen3": HFModel(config="Qwen3Config", keys={"head_dim": 12}),
    # Fused tensors; of 8 dimensions rope turns 6.
    "phi3": HFModel(
        config="Phi3Config",
        keys={
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "granite": HFModel(
        config="GraniteConfig",
        keys=_MULTIPLIERS,
    ),
    "mistral-small": HFModel(config="MistralConfig", keys={"sliding_window": None, "head_dim": 12}),
    # By default, the embedding of token 1 gets no gradient.
    "seed_oss": HFModel(config="SeedOssConfig", keys={"head_dim": 12, "pad_token_id": None}),
    # The activation as published.
    "gemma": HFModel(config="GemmaConfig", keys={"head_dim": 12}, written={"hidden_act": "gelu"}),
    # Scores and logits near their caps, as published: every other layer has windows, beginning with the first.
    "gemma2": HFModel(
        config="Gemma2Config",
        keys={
            **_WINDOWS,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
            "pad_token_id": None,
        },
        written={"rope_theta": 10000.0},
        left_out=("layer_types", "rope_parameters", "hidden_act"),
    ),
    "gemma3": HFModel(
        config="Gemma3TextConfig",
        keys={
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                _FULL: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
            "pad_token_id": None,
        },
    ),
    # With small outputs before a norm, transformers itself errs by 1e-5; a larger ε keeps them small.
    "olmo2": HFModel(config="Olmo2Config", keys={"rms_norm_eps": 0.01, "pad_token_id": None}),
    # As published: YaRN in layers without windows alone.
    "olmo3": HFModel(
        config="Olmo3Config",
        keys={**_WINDOWS, "rms_norm_eps": 0.01, "pad_token_id": None},
        written={
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "attention_factor": 1.5,
            },
        },
        left_out=("rope_parameters",),
    ),
}
# Windows shorter than most rows, in all layers and in layers 2 to 4.
WINDOWED = {
    "mistral-window": HFModel(config="MistralConfig", keys={"sliding_window": 7}, left_out=("head_dim",)),
    "qwen3-windows": HFModel(
        config="Qwen3Config",
        keys={"head_dim": 12, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
}
# What a layer adds to the residual stream.
OUTPUTS = ("out_proj", "o_proj", "down_proj")
# Four value heads of gated delta nets on two key heads, in all layers but the third.
_HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
DENSE["qwen3_5"] = HFModel(config="Qwen3_5TextConfig", keys=_HYBRID)
_QWEN3_MOE = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 12}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
# Attention through latents, a dense layer first, shared experts.
_DEEPSEEK = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 6,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_V3 = {**_DEEPSEEK, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "num_mtp_layers": 0}
WITH_EXPERTS = {
    "qwen3_moe": HFModel(config="Qwen3MoeConfig", keys={**_QWEN3_MOE, "norm_topk_prob": True}),
    # Probabilities among all experts; layers 0, 2 and 4 are dense.
    "qwen3_moe-mixed": HFModel(config="Qwen3MoeConfig", keys={**_QWEN3_MOE, "decoder_sparse_step": 2}),
    # A shared expert with a gate; layer 0 is dense.
    "qwen2_moe": HFModel(
        config="Qwen2MoeConfig",
        keys={
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
    ),
    "minimax_m2": HFModel(
        config="MiniMaxM2Config",
        keys={
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    # Layer 1 is dense.
    "qwen3_next": HFModel(
        config="Qwen3NextConfig",
        keys={
            **_HYBRID,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_moe": HFModel(
        config="Qwen3_5MoeTextConfig",
        keys={
            **_HYBRID,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "mixtral": HFModel(
        config="MixtralConfig", keys={"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    # Experts in stacked tensors, whose gates and ups are sections.
    "granitemoe": HFModel(
        config="GraniteMoeConfig",
        keys={**_MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    # Queries without latents, experts without groups.
    "deepseek_v2-lite": HFModel(
        config="DeepseekV2Config",
        keys={**_DEEPSEEK, "q_lora_rank": None, "num_experts_per_tok": 2, "rope_parameters": _DEFAULT_ROPE},
    ),
    # Groups as rated by their best expert; Megatron itself would take two.
    "deepseek_v2": HFModel(
        config="DeepseekV2Config",
        keys={
            **_DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    # Groups as rated by their two best experts, with biases; Megatron itself would take one.
    "deepseek_v3": HFModel(config="DeepseekV3Config", keys={**_DEEPSEEK_V3, "rope_parameters": _DEFAULT_ROPE}),
    "deepseek_v3-yarn": HFModel(config="DeepseekV3Config", keys={**_DEEPSEEK_V3, "rope_parameters": _YARN}),
}
# Kimi-K2: no groups, and a ramp of YaRN between the frequencies that turn once.
WITH_EXPERTS["deepseek_v3-kimi"] = HFModel(
    config="DeepseekV3Config",
    keys={
        **_DEEPSEEK_V3,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_parameters": {**_YARN, "rope_theta": 50000.0, "beta_fast": 1.0, "mscale_all_dim": 1.0},
    },
)
# GLM-4.7-Flash; transformers has this ε in the norms of latents, whatever the config says.
WITH_EXPERTS["glm4_moe_lite"] = HFModel(
    config="Glm4MoeLiteConfig",
    keys={**_DEEPSEEK, "num_experts_per_tok": 2, "routed_scaling_factor": 1.8, "rope_parameters": _DEFAULT_ROPE},
)
_GLM4_MOE = {
    "head_dim": 12,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "num_mtp_layers": 0,
}
# Rope turns 6 of 12 dimensions. GLM-4.5-Air has no norms of queries and keys, the others do.
WITH_EXPERTS |= {
    "glm4_moe": HFModel(config="Glm4MoeConfig", keys={**_GLM4_MOE, "use_qk_norm": True}),
    "glm4_moe-air": HFModel(config="Glm4MoeConfig", keys=_GLM4_MOE),
}
# A layer with a window and one without, in turns.
WITH_EXPERTS["gpt_oss"] = HFModel(
    config="GptOssConfig",
    keys={
        "head_dim": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
)
MODELS = {**DENSE, **WINDOWED, **WITH_EXPERTS}


def make_model(
    path: Path,
    name: str,
    *,
    tied: bool,
    dtype: str = "float32",
    max_shard_size: str | int = "50GB",
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Random weights on which nothing is trivially 0 or 1: biases of deviation 1, norms that scale by [0.5, 2]."""
    described = MODELS[name]
    config = getattr(transformers, described.config)(**{**SIZES, **described.keys, **changes}, tie_word_embeddings=tied)
    hf = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            if key.endswith("gate_up_proj_bias"):
                # Many beyond the ±7 at which experts clamp.
                parameter.copy_(5 * random)
            elif key.endswith("bias"):
                # Those of time steps so that delta nets remember a few tokens.
                parameter.copy_(random - 2 * float(key.endswith("dt_bias")))
            elif parameter.ndim == 1:
                scales = 0.5 + 1.5 * torch.rand(parameter.shape, generator=generator)
                zero_centred = key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight")
                if zero_centred and described.config.startswith(("Gemma", "Qwen3Next", "Qwen3_5")):
                    # These are kept without the 1.
                    scales -= 1
                parameter.copy_(scales)
            elif "linear_num_key_heads" in described.keys and any(name in key for name in OUTPUTS):
                # The norm at a delta net's end magnifies errors of rounding, so its like add little to the stream.
                parameter.copy_(0.01 * random)
            else:
                parameter.copy_(0.09 * random)
        # Biases of routers are buffers; those of rotary embeddings are not saved.
        for key, buffer in hf.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    hf.save_pretrained(path, max_shard_size=max_shard_size)
    file = path / "config.json"
    written = {key: value for key, value in json.loads(file.read_text()).items() if key not in described.left_out}
    file.write_text(json.dumps({**written, **described.written}))
    (path / "tokenizer.json").write_text("{}")
    return path


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory, read by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def assert_same_tensors(got: Path, expected: Path) -> None:
    """The same names, shapes, types and bits in two model directories."""
    assert_same_bits(read_tensors(got), read_tensors(expected))


def assert_same_bits(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, shapes, types and bits."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype), name
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]
        assert torch.equal(got[name].view(bits), tensor.view(bits)), name
