"""Scale the frequencies of rotary embeddings for long contexts, as a config's `rope_type` says.

`ROPE_TYPES` maps each type to a dataclass, whose fields are the keys that it reads from the config. Its `scale` works
on the float32 frequencies ω_i = θ^(−2i/d) that Megatron computes. It has the same order of operations as transformers,
so that the results are bitwise equal.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainYarnRope:
    """RoPE scaling by YaRN (Peng et al. 2023) as attention without latents has it, such as gpt-oss's.

    ω becomes (1 − r)·ω + r·ω/factor, where the ramp r rises from 0 to 1 between the dimensions that turn `beta_fast`
    and `beta_slow` times within the original context; `truncate` rounds these to whole dimensions. Queries and keys
    are multiplied by `attention_factor`, by default 0.1·ln factor + 1.
    """

    rope_theta: float
    factor: float
    original_max_position_embeddings: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    @property
    def score_factor(self) -> float:
        """Return the factor of attention scores, products of queries and keys that are both scaled."""
        return (self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1) ** 2

    def scale(self, inv_freq: "torch.Tensor") -> "torch.Tensor":
        import torch

        dim, theta = 2 * len(inv_freq), self.rope_theta
        low, high = (
            dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 1e-3)
        kept = 1 - ramp.clamp(0, 1).to(inv_freq.device)
        wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=inv_freq.device) / dim)
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + inv_freq * kept


ROPE_TYPES: dict[str, type[RopeScaling]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": PlainYarnRope,
}
# Why types that published models have are refused.
_REASONS: dict[str, str] = {
    "longrope": "; transformers chooses its factors by the longest row so far and vLLM by max_model_len, so that the "
    "engines' log-probs would not be the trainer's"
}
# The types for models with latent attention.
LATENT_ROPE_TYPES: dict[str, type[RopeScaling] | type[YarnRope]] = {"default": DefaultRope, "yarn": YarnRope}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRope:
    """The RoPE of layers that attend within a window, where it differs from that of other layers.

    It has the base θ and is not scaled, since no distance is longer than in pre-training. layers: whether each has it.
    """

    theta: float
    layers: tuple[bool, ...]


def split_rope(rope: dict[str, Any], config: Mapping[str, Any], source: str) -> tuple[dict[str, Any], float]:
    """Return the rope settings of layers that attend to all positions, and θ of those that attend within a window.

    Current files have settings for both kinds of layers in `rope_parameters`, older ones `rope_scaling` for the former,
    `rope_theta`, and `rope_local_base_freq` if the latter have another θ. Errors begin with `source`.
    """
    if "full_attention" not in rope:
        return rope, float(config.get("rope_local_base_freq", rope["rope_theta"]))
    local = rope["sliding_attention"]
    if not isinstance(read_rope_scaling(local, source), DefaultRope):
        raise ConfigError(
            f"{source}: rope_parameters: sliding_attention has rope type {local['rope_type']!r}, expected 'default'; "
            "use the config.json the model was published with"
        )
    return rope["full_attention"], float(local["rope_theta"])


def read_rope_scaling(
    rope: Mapping[str, Any], source: str, types: Mapping[str, type[RopeScaling] | type[YarnRope]] = ROPE_TYPES
) -> RopeScaling | YarnRope:
    """Read the scaling from a config's `rope_parameters` (or older `rope_scaling`). Errors begin with `source`.

    Raises:
        ConfigError: the type is unknown, a key is missing or unknown for it, or a number is out of range.
    """
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in types:
        reason = _REASONS.get(name, "")
        raise ConfigError(f"{source}: rope type {name!r} is not supported; known: {sorted(types)}{reason}")
    rope_type: Any = types[name]
    known = {field.name: field for field in fields(rope_type)}
    wanted = {key for key, field in known.items() if field.default is MISSING} - _COMMON_KEYS
    values = {
        key: value for key, value in rope.items() if value is not None and (key in known or key not in _COMMON_KEYS)
    }
    given = values.keys() - _COMMON_KEYS
    if not wanted <= given <= known.keys():
        raise ConfigError(
            f"{source}: rope type {name!r} has keys {sorted(given)}, expected {sorted(wanted)}; "
            f"use the config.json the model was published with"
        )
    for key, value in sorted(values.items()):
        is_flag = known[key].type in (bool, "bool")
        if not isinstance(value, bool if is_flag else int | float) or not (is_flag or 0 < value < math.inf):
            raise ConfigError(
                f"{source}: rope key {key}: got {value!r}, expected {'a bool' if is_flag else 'a number > 0'}"
            )
    try:
        scaling: RopeScaling | YarnRope = rope_type(**values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return scaling
