"""Read what distinguishes the attention of a model's layers: windows, how much of each head rope turns, and of which
kind each layer is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.weights.rules import Family, Layers

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The options of a layer's softmax attention besides causality; layers with equal options are built alike.

    window: how many positions of its row a token attends to, its own included; None: to all before it. sinks: whether
    each head has one more score, a weight, in its softmax.
    score_cap: c if the scores s are capped to c·tanh(s/c).
    local_rope: where layers have two kinds of rope, whether it is that of layers with windows; None: there is one.
    softmax_scale: the factor of scores where rope is local; None: that of the heads' width.
    wide_norms: whether queries have a norm over all heads together, and keys another.
    whole_images: whether tokens that show an image attend to all of it.
    """

    window: int | None = None
    sinks: bool = False
    score_cap: float | None = None
    local_rope: bool | None = None
    softmax_scale: float | None = None
    wide_norms: bool = False
    whole_images: bool = False


def read_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window, or () if no layer has one that is shorter than the longest row."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not window or window >= config["max_position_embeddings"]:
        return ()
    windows = tuple(window if is_local else None for is_local in read_local_layers(config))
    return windows if any(windows) else ()


def read_local_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it attends within the model's window, however long that is.

    `layer_types` says it. Without it, all layers do except every `sliding_window_pattern`-th and the first
    `max_window_layers`; a family's `defaults` have those of these keys that its models know.
    """
    layers, pattern = range(config["num_hidden_layers"]), config.get("sliding_window_pattern")
    first = config.get("max_window_layers", 0)
    types = config.get("layer_types") or [
        FULL if layer < first or (pattern and (layer + 1) % pattern == 0) else SLIDING for layer in layers
    ]
    return tuple(kind == SLIDING for kind in types)


def read_rotary_fraction(config: Mapping[str, Any]) -> float:
    """Return the share of each head's dimensions, the first ones, that rope turns."""
    rope, fraction = config.get("rope_parameters") or config.get("rope_scaling") or {}, 1.0
    if "partial_rotary_factor" in rope:
        fraction = float(rope["partial_rotary_factor"])
    elif "rotary_dim" in config:
        # Published MiniMax-M2 has it in place of the share.
        fraction = config["rotary_dim"] / config["head_dim"]
    else:
        fraction = float(config.get("partial_rotary_factor", 1.0))
    if not 0 < fraction <= 1:
        raise ConfigError(f"config.json: partial_rotary_factor: got {fraction}, expected a number in (0, 1]")
    return fraction


# Names of lists over the layers of what reads images begin so.
_TOWER = "vision_"
_DENSE, _SPARSE = "dense", "sparse"
# Lists with an entry for each layer: the kinds that some family here builds, by entry.
_LISTS: Mapping[str, Mapping[object, str]] = {
    "layer_types": {FULL: FULL, SLIDING: SLIDING, LINEAR: LINEAR},
    "layers_block_type": {"attention": FULL, FULL: FULL, LINEAR: LINEAR},
    "attn_type_list": {1: FULL},
    "no_rope_layers": {1: FULL},  # which, in spite of its name, has 1 for layers with rope
    "mlp_layer_types": {_DENSE: _DENSE, _SPARSE: _SPARSE},
    "moe_layer_freq": {0: _DENSE, 1: _SPARSE},
}


def check_layer_lists(file: Path, family: Family, config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless each list over layers has an entry for each, of a kind that the family builds."""
    num_layers, parts = config["num_hidden_layers"], {rule.layers for rule in family.weights}
    built = {
        FULL: True,
        SLIDING: "sliding_window" in family.defaults and config.get("use_sliding_window", True),
        LINEAR: Layers.LINEAR in parts,
        _DENSE: Layers.DENSE in parts or Layers.EXPERTS not in parts,
        _SPARSE: Layers.EXPERTS in parts,
    }
    for key, value in config.items():
        is_over_layers = "layer" in key and isinstance(value, list) and not key.startswith(_TOWER)
        if value is None or not (key in _LISTS or is_over_layers):
            continue
        if isinstance(value, int) and key == "moe_layer_freq":  # of every how many layers
            continue
        expected = [entry for entry, kind in _LISTS.get(key, {}).items() if built[kind]]
        # It lists those with another MLP; each is a layer's number.
        if key == "mlp_only_layers":
            expected = [*range(num_layers)] if key in family.defaults else []
        elif not isinstance(value, list) or (expected and len(value) != num_layers):
            got = f"{len(value)} entries" if isinstance(value, list) else repr(value)
            raise ConfigError(
                f"{file}: {key}: got {got}, expected one for each of num_hidden_layers={num_layers} layers; copy the "
                "model's config.json again"
            )
        if wrong := [entry for entry in value if entry not in expected]:
            names = " or ".join(map(str, expected)) if expected and len(expected) < num_layers else "none"
            raise ConfigError(
                f"{file}: {key}: got {wrong[0]!r}, expected {names}, as a {family.name} model with the file's other "
                "keys has no other layers here; copy the model's config.json again, or use another model"
            )
