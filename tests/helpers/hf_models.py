"""Small models of every family as transformers writes them, with sizes that no layout divides evenly."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

# 517 is prime. Six query heads share two key/value heads; five layers are 3 + 2.
SIZES: dict[str, Any] = {
    "vocab_size": 517,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModel:
    """A transformers config, and keys of it."""

    config: type[PreTrainedConfig]
    keys: Mapping[str, Any] = field(default_factory=dict)


DENSE = {
    "llama": HFModel(config=LlamaConfig),
    "mistral": HFModel(config=MistralConfig, keys={"sliding_window": None}),
    "qwen2": HFModel(config=Qwen2Config),
    "qwen3": HFModel(config=Qwen3Config, keys={"head_dim": 12}),
}
_EXPERTS = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 12}
WITH_EXPERTS = {
    "qwen3_moe": HFModel(config=Qwen3MoeConfig, keys={**_EXPERTS, "mlp_only_layers": []}),
    "qwen3_moe-mixed": HFModel(config=Qwen3MoeConfig, keys={**_EXPERTS, "mlp_only_layers": [0]}),
    "deepseek_v3": HFModel(
        config=DeepseekV3Config,
        keys={
            "num_key_value_heads": 6,
            "q_lora_rank": 20,
            "kv_lora_rank": 28,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 20,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "mixtral": HFModel(
        config=MixtralConfig, keys={"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}
    ),
}
MODELS = {**DENSE, **WITH_EXPERTS}


def make_model(
    path: Path, family: str, *, tied: bool, dtype: str = "float32", max_shard_size: str | int = "50GB", **changes: Any
) -> Path:
    """Random weights, none of them 0 or 1."""
    described = MODELS[family]
    config = described.config(**{**SIZES, **described.keys, **changes}, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Biases of routers are buffers; those of rotary embeddings are not saved.
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for tensor in [*model.parameters(), *biases]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(path, max_shard_size=max_shard_size)
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
    ours, theirs = read_tensors(got), read_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]
        assert torch.equal(ours[name].view(bits), tensor.view(bits)), name
