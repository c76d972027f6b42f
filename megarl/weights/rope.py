"""Rotary embeddings of long-context models: how their frequencies are scaled, by a config's `rope_type`.

A rope type is an entry of `ROPE_TYPES`: a dataclass whose fields are the keys it reads from the config. Scaling is
arithmetic on the float32 frequencies ω_i = θ^(−2i/d) that Megatron computes, in transformers' order of operations,
so both have the same bits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from megarl.errors import ConfigError

if TYPE_CHECKING:
    import torch

_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta"})


class RopeScaling(Protocol):
    """Frequencies ω [d/2] of a rotary embedding → those the model was trained with."""

    def scale(self, inv_freq: "torch.Tensor") -> "torch.Tensor": ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRope:
    """ω (Su et al. 2021)."""

    def scale(self, inv_freq: "torch.Tensor") -> "torch.Tensor":
        return inv_freq


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """ω / factor: positions are interpolated (Chen et al. 2023)."""

    factor: float

    def scale(self, inv_freq: "torch.Tensor") -> "torch.Tensor":
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """(1 − s)·ω/factor + s·ω with s = clip((L·ω/2π − low) / (high − low), 0, 1)  (Llama 3.1; Dubey et al. 2024).

    L·ω/2π counts the turns within the original context L: below `low_freq_factor` a frequency is divided by
    `factor`, above `high_freq_factor` it is kept.
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
    """Frequencies divided by `factor` where they turn less than `beta_slow` times within the original context, kept
    where they turn more than `beta_fast` times, and attention scores scaled by (0.1·mscale_all_dim·ln factor + 1)²
    (YaRN, Peng et al. 2023, as DeepSeek has it). Megatron's latent attention computes it.
    """

    factor: float
    original_max_position_embeddings: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


ROPE_TYPES: dict[str, type[RopeScaling]] = {"default": DefaultRope, "linear": LinearRope, "llama3": Llama3Rope}
# Of models with latent attention.
LATENT_ROPE_TYPES: dict[str, type[RopeScaling] | type[YarnRope]] = {"default": DefaultRope, "yarn": YarnRope}


def read_rope_scaling(
    rope: Mapping[str, Any], source: str, types: Mapping[str, type[RopeScaling] | type[YarnRope]] = ROPE_TYPES
) -> RopeScaling | YarnRope:
    """The scaling of a config's `rope_parameters` (or older `rope_scaling`); `source` opens every message.

    Raises:
        ConfigError: an unknown type, a key that the type lacks or does not know, or a number out of range.
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
