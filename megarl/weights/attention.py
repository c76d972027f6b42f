"""Read what distinguishes the attention of a model's layers: windows, and how much of each head rope turns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The options of a layer's softmax attention besides causality; layers with equal options are built alike.

    window: how many positions of its row a token attends to, its own included; None: to all before it. sinks: whether
    each head has one more score, a weight, in its softmax.
    """

    window: int | None = None
    sinks: bool = False


def read_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window, or () if no layer has one that is shorter than the longest row.

    `layer_types` says which layers have windows. Without it, all do except every `sliding_window_pattern`-th and the
    first `max_window_layers`; a family's `defaults` have those of these keys that its models know.
    """
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not window or window >= config["max_position_embeddings"]:
        return ()
    layers, pattern = range(config["num_hidden_layers"]), config.get("sliding_window_pattern")
    first = config.get("max_window_layers", 0)
    types = config.get("layer_types") or [
        _FULL if layer < first or (pattern and (layer + 1) % pattern == 0) else _SLIDING for layer in layers
    ]
    if len(types) != len(layers) or not {*types} <= {_FULL, _SLIDING}:
        raise ConfigError(
            f"config.json: layer_types: got {types}, expected {_FULL} or {_SLIDING} for each of {len(layers)} layers; "
            "copy the model's config.json again"
        )
    windows = tuple(window if kind == _SLIDING else None for kind in types)
    return windows if any(windows) else ()


def read_rotary_fraction(config: Mapping[str, Any]) -> float:
    """Return the share of each head's dimensions, the first ones, that rope turns."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fraction = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    if not 0 < fraction <= 1:
        raise ConfigError(f"config.json: partial_rotary_factor: got {fraction}, expected a number in (0, 1]")
    return fraction
