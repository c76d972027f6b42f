"""Check the lists of a config.json that say of which kind each layer is: a family builds some kinds, engines others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.weights.attention import FULL, LINEAR, SLIDING
from megarl.weights.rules import Family, Layers

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
