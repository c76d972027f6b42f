"""Register the families whose layers have attention and one MLP."""

from megarl.weights.blocks import (
    DECODER,
    DENSE_MLP,
    FUSED_DECODER,
    FUSED_MLP,
    NORMS_AFTER_DECODER,
    NORMS_AROUND_DECODER,
    OUTPUT_HEAD,
    QK_NORM,
    QKV_BIAS,
    ROTARY_FREQUENCIES,
    WIDE_QK_NORM,
)
from megarl.weights.rules import NO_MULTIPLIERS, Activation, Family
from megarl.weights.tables import FAMILIES, register_family, register_multimodal

_MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    weights=DECODER + DENSE_MLP,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    required={"hidden_act": ("silu",)},
)
_GEMMA3 = Family(
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

for _family in (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        weights=DECODER + DENSE_MLP,
        required={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        ignored=(ROTARY_FREQUENCIES,),
    ),
    _MISTRAL,
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
    ),
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
    ),
    Family(
        name="seed_oss",
        architectures=("SeedOssForCausalLM",),
        weights=DECODER + DENSE_MLP + QKV_BIAS,
        qkv_bias="attention_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        required={"hidden_act": ("silu",), "attention_out_bias": (False,), "mlp_bias": (False,)},
    ),
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
    ),
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        weights=FUSED_DECODER + FUSED_MLP,
        defaults={"partial_rotary_factor": 1.0, "sliding_window": None},
        required={"hidden_act": ("silu",), "attention_bias": (None, False)},
    ),
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        weights=DECODER + DENSE_MLP,
        defaults=NO_MULTIPLIERS,
        required={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
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
    ),
    _GEMMA3,
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        weights=NORMS_AFTER_DECODER + DENSE_MLP + WIDE_QK_NORM,
        norms_before=False,
        norms_after=True,
        wide_qk_norm=True,
        defaults={"qk_norm_type": "per_layer"},
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
    ),
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
    ),
):
    register_family(_family)
_LLAVA_TOWER = {name: name for name in ("vision_tower.", "multi_modal_projector.")}
register_multimodal(
    _GEMMA3,
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    prefix="language_model.model.",
    # transformers leaves the second part of a name out.
    vision={"vision_tower.vision_model.": "vision_tower.", **_LLAVA_TOWER},
    sees_whole_images=True,
    defaults={
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
)
register_multimodal(
    _MISTRAL,
    name="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    prefix="language_model.model.",
    head=f"language_model.{OUTPUT_HEAD}",
    vision=_LLAVA_TOWER,
)
for _text in ("qwen2", "qwen3"):
    register_multimodal(
        FAMILIES.get(_text),
        name=f"internvl_{_text}",
        architecture="InternVLForConditionalGeneration",
        language=_text,
        prefix="language_model.model.",
        head=f"language_model.{OUTPUT_HEAD}",
        vision=_LLAVA_TOWER,
    )
# As published; only transformers names its modules otherwise.
register_multimodal(
    FAMILIES.get("qwen2"),
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    prefix="model.",
    vision={"visual.": "visual."},
    ignored_rope=("mrope_section",),
)
register_multimodal(
    FAMILIES.get("qwen3"),
    name="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    ignored_rope=("mrope_section", "mrope_interleaved"),
    interleaves_mrope=True,
)
