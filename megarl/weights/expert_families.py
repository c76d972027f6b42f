"""Register the families whose layers have experts, and those some of whose layers have gated delta nets."""

from dataclasses import replace

from megarl.weights.blocks import (
    DECODER,
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    LATENT_DECODER,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    WIDE_QK_NORM,
    expert_mlps,
    router_bias,
)
from megarl.weights.hybrid import BY_HEAD_DECODER, BY_PART_DECODER
from megarl.weights.rules import NO_MULTIPLIERS, Activation, Family
from megarl.weights.stacked_blocks import (
    BIASED_EXPERTS,
    OUTPUT_BIAS,
    SINKS,
    SPARSE_EXPERTS,
    STACKED_EXPERTS,
    TRANSPOSED_EXPERTS,
)
from megarl.weights.tables import FAMILIES, register_family, register_multimodal

# transformers uses this epsilon for the norms of latents, whatever rms_norm_eps config.json has for the other norms.
_LATENT_NORM_EPS = 1e-6

_DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    lost_in_peft="mlp",
    architectures=("DeepseekV3ForCausalLM",),
    weights=LATENT_DECODER + ROUTER_BIAS,
    qk_layernorm=True,
    defaults={
        "num_key_value_heads": 128,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
    },
    required={
        # Kimi-K2 is published as kimi_k2.
        "model_type": ("deepseek_v3",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "norm_topk_prob": (True,),
        "rope_interleave": (True,),
        "rms_norm_eps": (_LATENT_NORM_EPS,),
    },
    expert_ffn_key="moe_intermediate_size",
    normalizes_experts=True,
    group_rating=2,
    biased_routers=True,
)

for _family in (
    Family(
        name="granitemoe",
        lost_in_peft="experts",
        ends_on_every_stage=True,
        architectures=("GraniteMoeForCausalLM",),
        weights=DECODER + SPARSE_EXPERTS,
        defaults=NO_MULTIPLIERS,
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
        expert_ffn_key="intermediate_size",
        normalizes_experts=True,
    ),
    Family(
        name="qwen3_moe",
        lost_in_peft="mlp",
        ends_on_every_stage=True,
        architectures=("Qwen3MoeForCausalLM",),
        weights=DECODER + DENSE_MLP + expert_mlps("mlp", "gate_proj", "up_proj", "down_proj") + QK_NORM,
        qk_layernorm=True,
        defaults={
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
        },
        # Transformers and published files disagree about which layers would have windows.
        required={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
        expert_ffn_key="moe_intermediate_size",
    ),
    Family(
        name="qwen2_moe",
        lost_in_peft="experts",
        ends_on_every_stage=True,
        architectures=("Qwen2MoeForCausalLM",),
        weights=DECODER
        + DENSE_MLP
        + expert_mlps("mlp", "gate_proj", "up_proj", "down_proj")
        + GATED_SHARED_EXPERT
        + QKV_BIAS,
        qkv_bias="qkv_bias",
        gates_shared_expert=True,
        defaults={
            "num_key_value_heads": 16,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        # As in Qwen3-MoE.
        required={"hidden_act": ("silu",), "use_sliding_window": (False,)},
        expert_ffn_key="moe_intermediate_size",
    ),
    Family(
        name="mixtral",
        ends_on_every_stage=True,
        architectures=("MixtralForCausalLM",),
        weights=DECODER + expert_mlps("block_sparse_moe", "w1", "w3", "w2"),
        defaults={"num_key_value_heads": 8, "rope_theta": 1000000.0, "sliding_window": None},
        required={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
        expert_ffn_key="intermediate_size",
        normalizes_experts=True,
    ),
    Family(
        name="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        weights=DECODER
        + expert_mlps("block_sparse_moe", "w1", "w3", "w2")
        + router_bias("block_sparse_moe.e_score_correction_bias")
        + WIDE_QK_NORM,
        wide_qk_norm=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5000000.0,
            "partial_rotary_factor": 1.0,
            "qk_norm_type": "per_layer",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        required={
            "hidden_act": ("silu",),
            "router_jitter_noise": (0.0,),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
        },
        expert_ffn_key="intermediate_size",
        normalizes_experts=True,
        group_rating=1,
        biased_routers=True,
    ),
    Family(
        name="deepseek_v2",
        lost_in_peft="mlp",
        architectures=("DeepseekV2ForCausalLM",),
        weights=LATENT_DECODER,
        qk_layernorm=True,
        defaults={"n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy"},
        required={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "topk_method": ("greedy", "group_limited_greedy"),
            # DeepSeek's code, transformers and vLLM disagree about what True means.
            "norm_topk_prob": (False,),
            "rms_norm_eps": (_LATENT_NORM_EPS,),
        },
        expert_ffn_key="moe_intermediate_size",
        normalizes_experts=False,
        group_rating=1,
    ),
    _DEEPSEEK_V3,
    replace(
        _DEEPSEEK_V3,
        name="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        defaults={
            "num_key_value_heads": 20,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        # Norms of latents have rms_norm_eps, as in vLLM and Megatron; transformers has 1e-6 there.
        required={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "norm_topk_prob": (True,),
            "rope_interleave": (True,),
        },
    ),
    Family(
        name="glm4_moe",
        lost_in_peft="mlp",
        architectures=("Glm4MoeForCausalLM",),
        weights=DECODER
        + DENSE_MLP
        + expert_mlps("mlp", "gate_proj", "up_proj", "down_proj")
        + SHARED_EXPERTS
        + ROUTER_BIAS
        + QKV_BIAS
        + QK_NORM,
        qkv_bias="attention_bias",
        qk_layernorm="use_qk_norm",
        defaults={
            "num_key_value_heads": 8,
            "attention_bias": False,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        required={"hidden_act": ("silu",), "norm_topk_prob": (True,)},
        expert_ffn_key="moe_intermediate_size",
        normalizes_experts=True,
        group_rating=2,
        biased_routers=True,
    ),
    Family(
        name="gpt_oss",
        lost_in_peft="experts",
        ends_on_every_stage=True,
        architectures=("GptOssForCausalLM",),
        weights=DECODER + QKV_BIAS + OUTPUT_BIAS + SINKS + BIASED_EXPERTS,
        qkv_bias=True,
        linear_biases=True,
        sinks=True,
        activation=Activation.CLAMPED_SWIGLU,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        # vLLM knows no other values.
        required={
            "hidden_act": ("silu",),
            "attention_bias": (True,),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
            "rms_norm_eps": (1e-5,),
        },
        expert_ffn_key="intermediate_size",
        normalizes_experts=True,
    ),
):
    register_family(_family)
# Transformers normalises routing weights whatever the config says.
register_multimodal(
    replace(FAMILIES.get("qwen3_moe"), weights=DECODER + DENSE_MLP + TRANSPOSED_EXPERTS + QK_NORM),
    name="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    ignored_rope=("mrope_section", "mrope_interleaved"),
    interleaves_mrope=True,
    lost_in_peft="experts",
    normalizes_experts=True,
    required={**FAMILIES.get("qwen3_moe").required, "norm_topk_prob": (True,)},
)
register_multimodal(
    FAMILIES.get("glm4_moe"),
    name="glm4v_moe",
    architecture="Glm4vMoeForConditionalGeneration",
    ignored_rope=("mrope_section",),
    defaults={"attention_bias": True},
)


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
