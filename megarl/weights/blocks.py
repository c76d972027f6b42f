"""Define groups of weight rules for parts of a decoder, such as an MLP, from which `*_families.py` build families."""

from megarl.weights.rules import Layers, Partition, WeightRule
from megarl.weights.rules import weight_rule as _rule

_L, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

# Early Llama checkpoints carry this tensor, although nothing reads it.
ROTARY_FREQUENCIES = f"{_HF}self_attn.rotary_emb.inv_freq"

# The scalar head of a critic or reward model; a language model's checkpoint has none.
VALUE_HEAD = "score.weight"
# The language model's head, which a scalar head replaces.
OUTPUT_HEAD = "lm_head.weight"

_ENDS = (
    _rule(Partition.VOCAB, "embedding.word_embeddings.weight", ("model.embed_tokens.weight", "vocab hidden")),
    _rule(Partition.REPLICATED, "decoder.final_layernorm.weight", ("model.norm.weight", "hidden")),
    _rule(Partition.VOCAB, "output_layer.weight", (OUTPUT_HEAD, "vocab hidden"), tied_to="model.embed_tokens.weight"),
    _rule(Partition.REPLICATED, "value_head.weight", (VALUE_HEAD, "one hidden")),
)

_INPUT_NORM = (
    _rule(
        Partition.REPLICATED,
        f"{_L}input_layernorm.weight | {_L}self_attention.linear_qkv.layer_norm_weight",
        (f"{_HF}input_layernorm.weight", "hidden"),
    ),
)

_MLP_NORM = (
    _rule(
        Partition.REPLICATED,
        f"{_L}pre_mlp_layernorm.weight | {_L}mlp.linear_fc1.layer_norm_weight",
        (f"{_HF}post_attention_layernorm.weight", "hidden"),
    ),
)

_ATTENTION = (
    _rule(
        Partition.QKV,
        f"{_L}self_attention.linear_qkv.weight",
        (f"{_HF}self_attn.q_proj.weight", "q hidden"),
        (f"{_HF}self_attn.k_proj.weight", "kv hidden"),
        (f"{_HF}self_attn.v_proj.weight", "kv hidden"),
    ),
    _rule(
        Partition.COLUMNS,
        f"{_L}self_attention.linear_proj.weight",
        (f"{_HF}self_attn.o_proj.weight", "hidden q"),
    ),
)
DECODER = _ENDS + _INPUT_NORM + _ATTENTION + _MLP_NORM
# A decoder without what each layer has in the place of attention, and the norm before it.
FRAME = _ENDS + _MLP_NORM

# Queries, keys and values are sections of one tensor, as are gate and up (Phi-3).
_QKV_SECTIONS, _GATE_UP_SECTIONS = f"{_HF}self_attn.qkv_proj.weight", f"{_HF}mlp.gate_up_proj.weight"
FUSED_DECODER = (
    *_ENDS,
    *_INPUT_NORM,
    _rule(
        Partition.QKV,
        f"{_L}self_attention.linear_qkv.weight",
        (_QKV_SECTIONS, "q hidden"),
        (_QKV_SECTIONS, "kv hidden"),
        (_QKV_SECTIONS, "kv hidden"),
    ),
    _ATTENTION[-1],
    *_MLP_NORM,
)

# Norms after attention and MLP, in place of those before (OLMo 2) or besides them (Gemma 2). Where Megatron adds what a
# block computes to the residual stream, these have taken the place of its function.
_NORMS_AFTER = (
    _rule(
        Partition.REPLICATED,
        f"{_L}self_attn_bda.weight",
        (f"{_HF}post_attention_layernorm.weight", "hidden"),
    ),
    _rule(
        Partition.REPLICATED,
        f"{_L}mlp_bda.weight",
        (f"{_HF}post_feedforward_layernorm.weight", "hidden"),
    ),
)
_SECOND_MLP_NORM = (
    _rule(
        Partition.REPLICATED,
        f"{_L}pre_mlp_layernorm.weight | {_L}mlp.linear_fc1.layer_norm_weight",
        (f"{_HF}pre_feedforward_layernorm.weight", "hidden"),
    ),
)
NORMS_AFTER_DECODER = _ENDS + _ATTENTION + _NORMS_AFTER
NORMS_AROUND_DECODER = _ENDS + _INPUT_NORM + _ATTENTION + _NORMS_AFTER + _SECOND_MLP_NORM

# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The down-projections into latents are small, so every
# rank has them in full. Small models have no latent for queries and project them directly.
_LATENT_ATTENTION = (
    _rule(
        Partition.ROWS,
        f"{_L}self_attention.linear_q_proj.weight",
        (f"{_HF}self_attn.q_proj.weight", "q_without_latent hidden"),
    ),
    _rule(
        Partition.REPLICATED,
        f"{_L}self_attention.linear_q_down_proj.weight",
        (f"{_HF}self_attn.q_a_proj.weight", "q_latent hidden"),
    ),
    _rule(
        Partition.REPLICATED,
        f"{_L}self_attention.q_layernorm.weight | {_L}self_attention.linear_q_up_proj.layer_norm_weight",
        (f"{_HF}self_attn.q_a_layernorm.weight", "q_latent"),
    ),
    _rule(
        Partition.ROWS,
        f"{_L}self_attention.linear_q_up_proj.weight",
        (f"{_HF}self_attn.q_b_proj.weight", "q q_latent"),
    ),
    _rule(
        Partition.REPLICATED,
        f"{_L}self_attention.linear_kv_down_proj.weight",
        (f"{_HF}self_attn.kv_a_proj_with_mqa.weight", "kv_latent_and_rope hidden"),
    ),
    _rule(
        Partition.REPLICATED,
        f"{_L}self_attention.kv_layernorm.weight | {_L}self_attention.linear_kv_up_proj.layer_norm_weight",
        (f"{_HF}self_attn.kv_a_layernorm.weight", "kv_latent"),
    ),
    _rule(
        Partition.ROWS,
        f"{_L}self_attention.linear_kv_up_proj.weight",
        (f"{_HF}self_attn.kv_b_proj.weight", "keys_and_values kv_latent"),
    ),
    _rule(
        Partition.COLUMNS,
        f"{_L}self_attention.linear_proj.weight",
        (f"{_HF}self_attn.o_proj.weight", "hidden values"),
    ),
)


def _gated_mlp(module: str, block: str, width: str, layers: Layers) -> tuple[WeightRule, ...]:
    """Return the weight rules of an MLP, given its names in Megatron and in the checkpoint, and that of its width."""
    return (
        _rule(
            Partition.GATE_UP,
            f"{_L}{module}.linear_fc1.weight",
            (f"{_HF}{block}.gate_proj.weight", f"{width} hidden"),
            (f"{_HF}{block}.up_proj.weight", f"{width} hidden"),
            layers=layers,
        ),
        _rule(
            Partition.COLUMNS,
            f"{_L}{module}.linear_fc2.weight",
            (f"{_HF}{block}.down_proj.weight", f"hidden {width}"),
            layers=layers,
        ),
    )


DENSE_MLP = _gated_mlp("mlp", "mlp", "ffn", Layers.DENSE)

FUSED_MLP = (
    _rule(
        Partition.GATE_UP,
        f"{_L}mlp.linear_fc1.weight",
        (_GATE_UP_SECTIONS, "ffn hidden"),
        (_GATE_UP_SECTIONS, "ffn hidden"),
        layers=Layers.DENSE,
    ),
    DENSE_MLP[-1],
)


def expert_mlps(block: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Return the weight rules of router and experts, given the checkpoint's names of the block and its matrices."""
    local, grouped = f"{_L}mlp.experts.local_experts.{{expert}}.", f"{_L}mlp.experts."
    return (
        _rule(
            Partition.REPLICATED,
            f"{_L}mlp.router.weight",
            (f"{_HF}{block}.gate.weight", "experts hidden"),
            layers=Layers.EXPERTS,
        ),
        _rule(
            Partition.GATE_UP,
            f"{local}linear_fc1.weight | {grouped}linear_fc1.weight{{expert}}",
            (f"{_HF}{block}.experts.{{expert}}.{gate}.weight", "expert_ffn hidden"),
            (f"{_HF}{block}.experts.{{expert}}.{up}.weight", "expert_ffn hidden"),
            layers=Layers.EXPERTS,
        ),
        _rule(
            Partition.COLUMNS,
            f"{local}linear_fc2.weight | {grouped}linear_fc2.weight{{expert}}",
            (f"{_HF}{block}.experts.{{expert}}.{down}.weight", "hidden expert_ffn"),
            layers=Layers.EXPERTS,
        ),
    )


SHARED_EXPERTS = _gated_mlp("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", Layers.EXPERTS)
# One shared expert, whose output a sigmoid scales (Qwen2-MoE).
GATED_SHARED_EXPERT = (
    *_gated_mlp("mlp.shared_experts", "mlp.shared_expert", "shared_ffn", Layers.EXPERTS),
    _rule(
        Partition.REPLICATED,
        f"{_L}mlp.shared_experts.gate_weight",
        (f"{_HF}mlp.shared_expert_gate.weight", "one hidden"),
        layers=Layers.EXPERTS,
    ),
)

LATENT_DECODER = (
    _ENDS
    + _INPUT_NORM
    + _LATENT_ATTENTION
    + _MLP_NORM
    + DENSE_MLP
    + expert_mlps("mlp", "gate_proj", "up_proj", "down_proj")
    + SHARED_EXPERTS
)


def router_bias(tensor: str) -> tuple[WeightRule, ...]:
    """Return the weight rule of the bias that is added to routing scores only to choose experts, given its tensor in
    a layer. It is a buffer of Megatron's router, always float32.
    """
    return (
        _rule(
            Partition.REPLICATED,
            f"{_L}mlp.router.expert_bias",
            (f"{_HF}{tensor}", "experts"),
            layers=Layers.EXPERTS,
            is_float32=True,
        ),
    )


ROUTER_BIAS = router_bias("mlp.gate.e_score_correction_bias")


def _qk_norm(queries: tuple[Partition, str], keys: tuple[Partition, str]) -> tuple[WeightRule, ...]:
    """Return the weight rules of the norms of queries and keys, given how each is split, and its size."""
    return tuple(
        _rule(partition, f"{_L}self_attention.{name}_layernorm.weight", (f"{_HF}self_attn.{name}_norm.weight", size))
        for name, (partition, size) in (("q", queries), ("k", keys))
    )


QK_NORM = _qk_norm((Partition.REPLICATED, "qk_norm"), (Partition.REPLICATED, "qk_norm"))
# Norms over all heads together; a rank has the weights of its own heads.
WIDE_QK_NORM = _qk_norm((Partition.ROWS, "q"), (Partition.KEY_ROWS, "kv"))

QKV_BIAS = (
    _rule(
        Partition.QKV,
        f"{_L}self_attention.linear_qkv.bias",
        (f"{_HF}self_attn.q_proj.bias", "q_bias"),
        (f"{_HF}self_attn.k_proj.bias", "kv_bias"),
        (f"{_HF}self_attn.v_proj.bias", "kv_bias"),
    ),
)
