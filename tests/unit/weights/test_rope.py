"""Scaled rotary frequencies against transformers' and by hand, and what is refused."""

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.errors import ConfigError
from megarl.weights.rope import Llama3Rope, read_rope_scaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
# As gpt-oss has it.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3,
        LLAMA3 | {"factor": 32.0},
        LLAMA3 | {"low_freq_factor": 2, "high_freq_factor": 5, "original_max_position_embeddings": 4096},
        LINEAR,
        YARN,
        YARN | {"factor": 3.0, "truncate": True},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.25},
    ],
    ids=["llama-3.1", "llama-3.2", "other-constants", "linear", "yarn", "yarn-truncated", "yarn-factor"],
)
@pytest.mark.parametrize(("theta", "head_dim"), [(500000.0, 64), (10000.0, 80)])
def test_same_bits_as_transformers(rope: dict[str, Any], theta: float, head_dim: int) -> None:
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaling = read_rope_scaling({**rope, "rope_theta": theta}, "config.json")
    scaled = scaling.scale(inv_freq)
    config = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters={**rope, "rope_theta": theta}
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    # Both queries and keys are scaled.
    assert getattr(scaling, "score_factor", 1.0) == attention_factor**2
    assert torch.equal(scaled, expected)
    assert not torch.equal(scaled, inv_freq)


def test_llama3_by_hand() -> None:
    """Turns within L = 8192: 8192 (kept), 4 (kept), 2.5 (s = 1/2), 1 (divided), 0.1 (divided)."""
    scaling = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192.0)
    per_turn = 2 * math.pi / 8192
    turns = torch.tensor([8192.0, 4.0, 2.5, 1.0, 0.1], dtype=torch.float64)
    # Half of 2.5 is kept, half is divided by 8.
    expected = torch.tensor([8192.0, 4.0, 1.25 + 1.25 / 8, 1 / 8, 0.1 / 8], dtype=torch.float64)
    torch.testing.assert_close(scaling.scale(turns * per_turn), expected * per_turn, rtol=1e-12, atol=0)


def without(rope: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in rope.items() if k != key}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0},
            r"rope type 'yarn' has keys \['factor'\], expected \['factor', 'original_max_position_embeddings'\]",
        ),
        (YARN | {"truncate": 1.0}, "rope key truncate: got 1.0, expected a bool"),
        ({"type": "dynamic", "factor": 4.0}, r"rope type 'dynamic' is not supported; known: \['default', [^;]*$"),
        # Phi-4-mini.
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope type 'longrope' .* by max_model_len"),
        (without(LLAMA3, "factor"), r"rope type 'llama3' has keys \['high.*expected \['factor', 'high_freq_factor'"),
        (without(LINEAR, "factor"), r"rope type 'linear' has keys \[\], expected \['factor'\]"),
        # A key that changes the model must not be passed over.
        (
            {"rope_type": "default", "factor": 2.0},
            r"rope type 'default' has keys \['factor'\], expected \[\]",
        ),
        (
            {"full_attention": {"rope_type": "default"}},
            r"rope type 'default' has keys \['full_attention'\], expected \[\]",
        ),
        (LINEAR | {"factor": 0}, "rope key factor: got 0, expected a number > 0"),
        (LINEAR | {"factor": "4"}, "rope key factor: got '4', expected a number > 0"),
        (LINEAR | {"factor": math.nan}, "rope key factor: got nan, expected a number > 0"),
        (LLAMA3 | {"high_freq_factor": 1.0}, r"rope key high_freq_factor: got 1\.0, expected > low_freq_factor=1\.0"),
    ],
)
def test_what_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^m/config.json: {message}"):
        read_rope_scaling(rope, "m/config.json")


@pytest.mark.parametrize("rope", [{"rope_type": "default"}])
def test_default_leaves_frequencies_alone(rope: dict[str, Any]) -> None:
    inv_freq = torch.tensor([1.0, 0.5])
    assert read_rope_scaling(rope, "config.json").scale(inv_freq) is inv_freq
