"""Scale the frequencies of rotary embeddings for long contexts, as a config's `rope_type` says.

`ROPE_TYPES` maps each type to a dataclass, whose fields are the keys that it reads from the config. Its `scale` works
on the float32 frequencies ω_i = θ^(−2i/d) that Megatron computes. It has the same order of operations as transformers,
so that the results are bitwise equal.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from megarl.errors import ConfigError

if TYPE_CHECKING:
    import torch

_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


class RopeScaling(Protocol):
    """The interface of RoPE scalings: `scale` maps default frequencies ω [d/2] to those the model was trained with."""

    def scale(self, inv_freq: "torch.Tensor") -> "torch.Tensor": ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRope:
    """RoPE without scaling: the frequencies ω stay as they are (Su et al. 2021)."""

    def scale(self, inv_freq: "torch.Tensor") -> "torch.Tensor":
        return inv_freq


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """RoPE scaling that divides all frequencies by `factor`, which interpolates positions (Chen et al. 2023)."""

    factor: float

    def scale(self, inv_freq: "torch.Tensor") -> "torch.Tensor":
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """RoPE scaling that divides low frequencies by `factor` and keeps high ones (Llama 3.1; Dubey et al. 2024).

    ω becomes (1 − s)·ω/factor + s·ω with s = clip((L·ω/2π − low_freq_factor) / (high_freq_factor − low_freq_factor), 0,
    1), where L·ω/2π is the number of turns within the original context L.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope key high_freq_factor: got {self.high_freq_factor}, expected > low_freq_factor="
                f"{self.low_freq_factor}"
            )

    def scale(self, inv_freq: "torch.Tensor") -> "torch.Tensor":
        turns = self.original_max_position_embeddings / (2 * math.pi / inv_freq)
        smooth = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - smooth) * inv_freq / self.factor + smooth * inv_freq


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """The settings of YaRN (Peng et al. 2023) in DeepSeek's variant, which Megatron's latent attention computes.

    Frequencies that turn less than `beta_slow` times within the original context are divided by `factor`; those that
    turn more than `beta_fast` times stay. Attention scores are scaled by (0.1·mscale_all_dim·ln factor + 1)².
    """

    factor: float
    original_max_position_embeddings: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


ROPE_TYPES: dict[str, type[RopeScaling]] = {"default": DefaultRope, "linear": LinearRope, "llama3": Llama3Rope}
# The types for models with latent attention.
LATENT_ROPE_TYPES: dict[str, type[RopeScaling] | type[YarnRope]] = {"default": DefaultRope, "yarn": YarnRope}


def read_rope_scaling(
    rope: Mapping[str, Any], source: str, types: Mapping[str, type[RopeScaling] | type[YarnRope]] = ROPE_TYPES
) -> RopeScaling | YarnRope:
    """Read the scaling from a config's `rope_parameters` (or older `rope_scaling`). Errors begin with `source`.

    Raises:
        ConfigError: the type is unknown, a key is missing or unknown for it, or a number is out of range.
    """
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in types:
        raise ConfigError(f"{source}: rope type {name!r} is not supported; known: {sorted(types)}")
    rope_type: Any = types[name]
    wanted = {field.name for field in fields(rope_type)}
    given = rope.keys() - _COMMON_KEYS
    if given != wanted:
        raise ConfigError(
            f"{source}: rope type {name!r} has keys {sorted(given)}, expected {sorted(wanted)}; "
            f"use the config.json the model was published with"
        )
    for key in sorted(wanted):
        if not isinstance(rope[key], int | float) or not 0 < rope[key] < math.inf:
            raise ConfigError(f"{source}: rope key {key}: got {rope[key]!r}, expected a number > 0")
    try:
        scaling: RopeScaling | YarnRope = rope_type(**{key: rope[key] for key in wanted})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return scaling
