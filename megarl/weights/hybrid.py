"""Define the weight rules of decoders that have gated delta nets in most layers, and gated attention in the others."""

from dataclasses import replace

from megarl.weights.blocks import FRAME
from megarl.weights.rules import Layers, Partition, WeightRule, weight_rule

_L, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_OURS, _THEIRS, _DELTA = f"{_L}self_attention.", f"{_HF}self_attn.", f"{_HF}linear_attn."


def _only(layers: Layers, *rules: WeightRule) -> tuple[WeightRule, ...]:
    return tuple(replace(rule, layers=layers) for rule in rules)


# Each query head's rows of q_proj are its query, then its output gate.
_GATED_ATTENTION = _only(
    Layers.ATTENTION,
    weight_rule(
        Partition.REPLICATED,
        f"{_L}input_layernorm.weight | {_OURS}linear_qkv.layer_norm_weight",
        (f"{_HF}input_layernorm.weight", "hidden"),
    ),
    weight_rule(
        Partition.GATED_QKV,
        f"{_OURS}linear_qkv.weight",
        (f"{_THEIRS}q_proj.weight", "two_q hidden"),
        (f"{_THEIRS}k_proj.weight", "kv hidden"),
        (f"{_THEIRS}v_proj.weight", "kv hidden"),
    ),
    weight_rule(Partition.COLUMNS, f"{_OURS}linear_proj.weight", (f"{_THEIRS}o_proj.weight", "hidden q")),
    weight_rule(Partition.REPLICATED, f"{_OURS}q_layernorm.weight", (f"{_THEIRS}q_norm.weight", "head_dim")),
    weight_rule(Partition.REPLICATED, f"{_OURS}k_layernorm.weight", (f"{_THEIRS}k_norm.weight", "head_dim")),
)

# All but the input projection.
_DELTA_NET = (
    weight_rule(
        Partition.REPLICATED,
        f"{_L}input_layernorm.weight | {_OURS}in_proj.layer_norm_weight",
        (f"{_HF}input_layernorm.weight", "hidden"),
    ),
    weight_rule(
        Partition.DELTA_HEADS,
        f"{_OURS}conv1d_weight",
        (f"{_DELTA}conv1d.weight", "delta_keys one conv"),
        (f"{_DELTA}conv1d.weight", "delta_keys one conv"),
        (f"{_DELTA}conv1d.weight", "delta_values one conv"),
    ),
    weight_rule(Partition.ROWS, f"{_OURS}A_log", (f"{_DELTA}A_log", "delta_value_heads")),
    weight_rule(Partition.ROWS, f"{_OURS}dt_bias", (f"{_DELTA}dt_bias", "delta_value_heads")),
    weight_rule(Partition.REPLICATED, f"{_OURS}norm_weight", (f"{_DELTA}norm.weight", "delta_value_head")),
    weight_rule(Partition.COLUMNS, f"{_OURS}out_proj.weight", (f"{_DELTA}out_proj.weight", "hidden delta_values")),
)


def _hybrid_decoder(*input_projections: tuple[str, str]) -> tuple[WeightRule, ...]:
    """Return the rules of a decoder, given the names and shapes of the tensors that project into its delta nets."""
    projection = weight_rule(Partition.DELTA_HEADS, f"{_OURS}in_proj.weight", *input_projections)
    return FRAME + _GATED_ATTENTION + _only(Layers.LINEAR, *_DELTA_NET, projection)


# Qwen3-Next's input projections are ordered by key head.
BY_HEAD_DECODER = _hybrid_decoder(
    (f"{_DELTA}in_proj_qkvz.weight", "delta_qkvz hidden"),
    (f"{_DELTA}in_proj_ba.weight", "delta_ba hidden"),
)

# Qwen3.5's have all queries first, then all keys, and so on.
BY_PART_DECODER = _hybrid_decoder(
    (f"{_DELTA}in_proj_qkv.weight", "delta_keys hidden"),
    (f"{_DELTA}in_proj_qkv.weight", "delta_keys hidden"),
    (f"{_DELTA}in_proj_qkv.weight", "delta_values hidden"),
    (f"{_DELTA}in_proj_z.weight", "delta_values hidden"),
    (f"{_DELTA}in_proj_b.weight", "delta_value_heads hidden"),
    (f"{_DELTA}in_proj_a.weight", "delta_value_heads hidden"),
)
