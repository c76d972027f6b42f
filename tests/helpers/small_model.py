"""A model's config.json, small enough to count by hand."""

import json
from pathlib import Path
from typing import Any

# h 8, q 4·2 = 8, k 2·2 = 4, f 12, V 10, 4 layers.
SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 12,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}


def write_config(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**SMALL, **changes}))
    return directory
