"""Small Qwen3 checkpoints on which nothing is trivially 0 or 1, and what transformers makes of them."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

# Transformers' models are imported in the functions alone: every process of a parallel session imports this module.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 264


def make_checkpoint(
    path: Path,
    *,
    tied: bool,
    dtype: str = "float32",
    seed: int = 0,
    num_layers: int = 2,
    max_shard_size: str | int = "50GB",
) -> Path:
    """A model whose norm weights are spread over [0.5, 2] and whose attention is not uniform."""
    from transformers import Qwen3ForCausalLM

    sizes = TinyModelConfig(
        hidden_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=96,
        tied=tied,
        dtype=dtype,
    )
    make_tiny_model(path, sizes, seed=seed)
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + 1.5 * torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.12 * torch.randn(parameter.shape, generator=generator))
    for file in path.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def load_hf(path: Path, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """The checkpoint in transformers, with its plain attention and experts, which run in every precision."""
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **plain)
    return model.eval()


def add_value_head(source: Path, path: Path, *, seed: int = 0) -> Path:
    """A critic of a language model's layers and a random scalar head, as transformers writes it."""
    from transformers import Qwen3ForSequenceClassification

    critic = Qwen3ForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        critic.score.weight.copy_(0.1 * torch.randn(critic.score.weight.shape, generator=generator))
    critic.save_pretrained(path)
    return path
