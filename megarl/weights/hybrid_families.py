"""Register the families some of whose layers have gated delta nets."""

from dataclasses import replace

from megarl.weights.blocks import (
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    expert_mlps,
)
from megarl.weights.hybrid import BY_HEAD_DECODER, BY_PART_DECODER
from megarl.weights.rules import Family
from megarl.weights.stacked_blocks import STACKED_EXPERTS
from megarl.weights.tables import register_family, register_multimodal

# For gated delta nets and the attention beside them.
_HYBRID_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

register_family(
    Family(
        name="qwen3_next",
        lost_in_peft="mlp",
        architectures=("Qwen3NextForCausalLM",),
        weights=BY_HEAD_DECODER
        + DENSE_MLP
        + expert_mlps("mlp", "gate_proj", "up_proj", "down_proj")
        + GATED_SHARED_EXPERT,
        qk_layernorm=True,
        norms_add_one=True,
        gated_attention=True,
        untrained=("mtp.",),
        defaults={
            **_HYBRID_DEFAULTS,
            "num_key_value_heads": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": True,
        },
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
        expert_ffn_key="moe_intermediate_size",
        gates_shared_expert=True,
    )
)
_QWEN3_5_DENSE = register_family(
    Family(
        name="qwen3_5_text",
        architectures=("Qwen3_5ForCausalLM",),
        weights=BY_PART_DECODER + DENSE_MLP,
        qk_layernorm=True,
        norms_add_one=True,
        gated_attention=True,
        untrained=("mtp.",),
        # How the coordinates of images turn heads; all of a token's are its position.
        ignored_rope=("mrope_section", "mrope_interleaved"),
        interleaves_mrope=True,
        defaults={**_HYBRID_DEFAULTS, "num_key_value_heads": 4},
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
    )
)
_MOE_DECODER = BY_PART_DECODER + GATED_SHARED_EXPERT
_QWEN3_5_MOE = register_family(
    replace(
        _QWEN3_5_DENSE,
        name="qwen3_5_moe_text",
        lost_in_peft="experts",
        architectures=("Qwen3_5MoeForCausalLM",),
        weights=_MOE_DECODER + expert_mlps("mlp", "gate_proj", "up_proj", "down_proj"),
        # Every layer has experts.
        defaults={**_HYBRID_DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 0},
        expert_ffn_key="moe_intermediate_size",
        normalizes_experts=True,
        gates_shared_expert=True,
    )
)
# As published; transformers writes a tensor for each expert.
register_multimodal(
    replace(_QWEN3_5_MOE, weights=_MOE_DECODER + STACKED_EXPERTS),
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
)
register_multimodal(_QWEN3_5_DENSE, name="qwen3_5", architecture="Qwen3_5ForConditionalGeneration")
