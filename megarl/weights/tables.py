"""Describe model families as data: which Hugging Face tensors make up each Megatron parameter.

To support another family, register a `Family`, here or in a plugin (`algo.plugins`); no other code knows the name of a
model. Loading, export, weight sync,
validation and estimates of sizes all derive from these tables. Nothing here imports torch or megatron.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megarl.registry import RegistrationError, Registry
from megarl.weights.blocks import (
    DECODER,
    DENSE_MLP,
    FUSED_DECODER,
    FUSED_MLP,
    GATED_SHARED_EXPERT,
    LATENT_DECODER,
    NORMS_AFTER_DECODER,
    NORMS_AROUND_DECODER,
    OUTPUT_HEAD,
    QK_NORM,
    QKV_BIAS,
    ROTARY_FREQUENCIES,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    VALUE_HEAD,
    WIDE_QK_NORM,
    expert_mlps,
    router_bias,
)
from megarl.weights.hybrid import BY_HEAD_DECODER, BY_PART_DECODER, within
from megarl.weights.rules import Activation, Family, HFTensor, Layers, Partition, WeightRule
from megarl.weights.stacked_blocks import BIASED_EXPERTS, OUTPUT_BIAS, SINKS, STACKED_EXPERTS, fused_experts

__all__ = [
    "FAMILIES",
    "OUTPUT_HEAD",
    "REFUSED",
    "VALUE_HEAD",
    "Family",
    "HFTensor",
    "Layers",
    "Partition",
    "WeightRule",
    "register_family",
]

# transformers uses this epsilon for the norms of latents, whatever rms_norm_eps config.json has for the other norms.
_LATENT_NORM_EPS = 1e-6

# By architecture, why a known one is refused.
REFUSED: Mapping[str, str] = {
    "Ministral3ForCausalLM": "vLLM does not scale its queries by their positions, since it reads llama_4_scaling where "
    "config.json has llama_4_scaling_beta; use a model of another architecture",
}

# What transformers takes for Granite's where config.json has none.
_NO_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}

FAMILIES: Registry[Family] = Registry("model family", key="config.json: architectures")


def register_family(family: Family) -> Family:
    """Register a family under its name; it is that of the models whose config.json names one of its architectures."""
    for other in FAMILIES.entries().values():
        if both := set(family.architectures) & set(other.architectures):
            raise RegistrationError(
                f"model family {family.name!r}: has the architecture {min(both)}, which {other.name} has already; "
                "remove it from one of them"
            )
    return FAMILIES.register(family.name)(family)


register_family(
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        weights=DECODER + DENSE_MLP,
        required={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        ignored=(ROTARY_FREQUENCIES,),
    )
)
_MISTRAL = register_family(
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        weights=DECODER + DENSE_MLP,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        required={"hidden_act": ("silu",)},
    )
)
register_family(
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        weights=DECODER + DENSE_MLP + QKV_BIAS,
        qkv_bias=True,
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        required={"hidden_act": ("silu",)},
    )
)
register_family(
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        weights=DECODER + DENSE_MLP + QK_NORM,
        qk_layernorm=True,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
    )
)
register_family(
    Family(
        name="seed_oss",
        architectures=("SeedOssForCausalLM",),
        weights=DECODER + DENSE_MLP + QKV_BIAS,
        qkv_bias="attention_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        required={"hidden_act": ("silu",), "attention_out_bias": (False,), "mlp_bias": (False,)},
    )
)
register_family(
    Family(
        name="gemma",
        ends_on_every_stage=True,
        architectures=("GemmaForCausalLM",),
        weights=DECODER + DENSE_MLP,
        activation=Activation.GELU_TANH,
        norms_add_one=True,
        scales_embedding=True,
        defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
        required={
            # Published config files say gelu but mean the tanh approximation.
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "attention_bias": (False,),
            "use_bidirectional_attention": (None, False),
        },
    )
)
register_family(
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        weights=FUSED_DECODER + FUSED_MLP,
        defaults={"partial_rotary_factor": 1.0, "sliding_window": None},
        required={"hidden_act": ("silu",), "attention_bias": (None, False)},
    )
)
register_family(
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        weights=DECODER + DENSE_MLP,
        defaults=_NO_MULTIPLIERS,
        required={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    )
)
register_family(
    Family(
        name="gemma2",
        ends_on_every_stage=True,
        architectures=("Gemma2ForCausalLM",),
        weights=NORMS_AROUND_DECODER + DENSE_MLP,
        norms_after=True,
        activation=Activation.GELU_TANH,
        norms_add_one=True,
        scales_embedding=True,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        required={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "use_bidirectional_attention": (None, False),
        },
    )
)
_GEMMA3 = register_family(
    Family(
        name="gemma3_text",
        ends_on_every_stage=True,
        architectures=("Gemma3ForCausalLM",),
        weights=NORMS_AROUND_DECODER + DENSE_MLP + QK_NORM,
        norms_after=True,
        qk_layernorm=True,
        local_rope=True,
        activation=Activation.GELU_TANH,
        norms_add_one=True,
        scales_embedding=True,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
        },
        required={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "use_bidirectional_attention": (False, None),
            # Transformers and vLLM ignore it.
            "attn_logit_softcapping": (None,),
        },
    )
)
register_family(
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        weights=NORMS_AFTER_DECODER + DENSE_MLP + WIDE_QK_NORM,
        norms_before=False,
        norms_after=True,
        wide_qk_norm=True,
        defaults={"qk_norm_type": "per_layer"},
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
    )
)
register_family(
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        weights=NORMS_AFTER_DECODER + DENSE_MLP + WIDE_QK_NORM,
        norms_before=False,
        norms_after=True,
        wide_qk_norm=True,
        local_rope=True,
        defaults={
            "qk_norm_type": "per_layer",
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
    )
)
register_family(
    Family(
        name="granitemoe",
        ends_on_every_stage=True,
        architectures=("GraniteMoeForCausalLM",),
        weights=DECODER
        + fused_experts(
            "block_sparse_moe", "router.layer.weight", gate_up="input_linear.weight", down="output_linear.weight"
        ),
        defaults=_NO_MULTIPLIERS,
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
        expert_ffn_key="intermediate_size",
        normalizes_experts=True,
    )
)
register_family(
    Family(
        name="qwen3_moe",
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
    )
)
register_family(
    Family(
        name="qwen2_moe",
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
    )
)
register_family(
    Family(
        name="mixtral",
        ends_on_every_stage=True,
        architectures=("MixtralForCausalLM",),
        weights=DECODER + expert_mlps("block_sparse_moe", "w1", "w3", "w2"),
        defaults={"num_key_value_heads": 8, "rope_theta": 1000000.0, "sliding_window": None},
        required={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
        expert_ffn_key="intermediate_size",
        normalizes_experts=True,
    )
)
register_family(
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
    )
)
register_family(
    Family(
        name="deepseek_v2",
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
    )
)
register_family(
    Family(
        name="deepseek_v3",
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
)
register_family(
    replace(
        FAMILIES.get("deepseek_v3"),
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
    )
)
register_family(
    Family(
        name="glm4_moe",
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
    )
)

# Of gated delta nets and the attention beside them.
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
        defaults={**_HYBRID_DEFAULTS, "num_key_value_heads": 4},
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
    )
)
register_family(
    Family(
        name="gpt_oss",
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
    )
)


def register_multimodal(
    text: Family,
    *,
    name: str,
    architecture: str,
    prefix: str = "model.language_model.",
    towers: tuple[str, ...] = ("model.visual.",),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Family:
    """Register the family of a published model that has one of the family `text` as its language model.

    Its tensors begin with `prefix` in the place of "model.", those of other parts with one of `towers`. defaults: for
    keys that published files leave out there.
    """
    return register_family(
        replace(
            text,
            name=name,
            architectures=(architecture,),
            weights=within(prefix, text.weights),
            section="text_config",
            untrained=(*towers, *text.untrained),
            defaults={**text.defaults, **defaults},
        )
    )


_MOE_DECODER = BY_PART_DECODER + GATED_SHARED_EXPERT
_QWEN3_5_MOE = register_family(
    replace(
        _QWEN3_5_DENSE,
        name="qwen3_5_moe_text",
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
register_multimodal(
    _GEMMA3,
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    prefix="language_model.model.",
    towers=("vision_tower.", "multi_modal_projector."),
    defaults={
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
)
register_family(
    replace(
        _MISTRAL,
        name="mistral3",
        architectures=("Mistral3ForConditionalGeneration",),
        weights=within("language_model.model.", _MISTRAL.weights, head=f"language_model.{OUTPUT_HEAD}"),
        section="text_config",
        untrained=("vision_tower.", "multi_modal_projector."),
    )
)
