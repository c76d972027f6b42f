"""A small checkpoint of a model with experts."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megarl_lab.recipes.tiny_model import make_byte_tokenizer
from tests.helpers.checkpoints import VOCAB_SIZE


def make_moe(path: Path, *, seed: int, **changes: Any) -> Path:
    """A small mixture of experts with two of four experts per token, but for changes to its configuration."""
    torch.manual_seed(seed)
    keys: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "initializer_range": 0.08,
        "max_position_embeddings": 512,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**keys, **changes})).save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return path
