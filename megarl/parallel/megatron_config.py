"""Describe a model under a parallel layout in Megatron's TransformerConfig."""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.config.schema import ActorConfig, LayoutConfig
from megarl.host.device.platform import platform
from megarl.parallel.backend import BACKENDS, accepted
from megarl.parallel.delta import delta_options
from megarl.parallel.latent import latent_options
from megarl.parallel.layout import Layout
from megarl.parallel.moe.setup import expert_options
from megarl.weights.dims import Dims
from megarl.weights.families import ModelSpec
from megarl.weights.rules import Activation, Layers


def transformer_config(
    spec: ModelSpec, dtype: torch.dtype, actor: ActorConfig, layout: Layout, *, batch_invariant: bool = False
) -> TransformerConfig:
    """Return Megatron's TransformerConfig for a model under a parallel layout."""
    dims, family, parallel = spec.dims, spec.family, layout.config
    backend, experts = BACKENDS[platform().name].options, expert_options(dims, parallel, actor.moe)
    grouped = {**backend, **experts}.get("moe_grouped_gemm", False)
    return (TransformerConfig if dims.latent is None else MLATransformerConfig)(
        num_layers=dims.num_layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.ffn,
        num_attention_heads=dims.num_heads,
        num_query_groups=dims.num_kv_heads,
        kv_channels=dims.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        layernorm_zero_centered_gamma=family.norms_add_one,
        gated_linear_unit=True,
        add_bias_linear=family.linear_biases,
        add_qkv_bias=dims.qkv_bias,
        qk_layernorm=dims.qk_norm,
        attention_output_gate=dims.gated,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=spec.softmax_scale,
        **_layout_options(parallel),
        **_recompute_options(actor, dims, groups_experts=bool(grouped)),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # We divide by our own global denominators; Megatron must not divide again.
        calculate_per_token_loss=True,
        # In blocks, E4M3 serves gradients as well.
        **({} if actor.fp8 is None else {"fp8": "e4m3", "fp8_recipe": actor.fp8}),
        **{
            # Megatron's default is refused for dense models too.
            "moe_token_dispatcher_type": "alltoall",
            **backend,
            **(accepted(TransformerConfig, **_INVARIANT) if batch_invariant else {}),
            **_ACTIVATIONS[family.activation],
            # With biases, Megatron's grouped experts do not fuse this.
            **({"bias_dropout_fusion": False} if family.linear_biases else {}),
            **latent_options(spec),
            **_window_options(dims),
            **delta_options(dims),
            **experts,
        },
    )


def _layout_options(parallel: LayoutConfig) -> dict[str, object]:
    """Return the fields of Megatron's configuration for a parallel layout."""
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pp if parallel.virtual_pp > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "pipeline_model_parallel_layout": parallel.pipeline_layout,
        "context_parallel_size": parallel.cp,
        # Packs differ in length, which `KnownShapes` looks up.
        "variable_seq_lengths": parallel.pp > 1,
        "overlap_p2p_comm": parallel.overlaps_p2p,
        "batch_p2p_comm": not parallel.overlaps_p2p,
        # Backward reads no number of what a stage has sent on. Overlapped, it may still be on its way.
        "deallocate_pipeline_outputs": parallel.pp > 1 and not parallel.overlaps_p2p,
        # Waiting for the device after each exchange was for faults of early versions of torch.
        "batch_p2p_sync": False,
        "sequence_parallel": parallel.sequence_parallel,
    }


def _window_options(dims: Dims) -> dict[str, object]:
    """Return the fields of Megatron's configuration for windows, which Transformer Engine's attention reads."""
    widths = {window for window in dims.windows if window is not None}
    if not widths:
        return {}
    # Megatron knows one width, which the family's models all have. It counts the positions before a token's own.
    (width,) = widths
    return {"window_size": (width - 1, 0), "window_attn_skip_freq": [int(each is not None) for each in dims.windows]}


def _recompute_options(actor: ActorConfig, dims: Dims, *, groups_experts: bool) -> dict[str, object]:
    """Return the fields of Megatron's configuration for what backward computes again."""
    if actor.recompute == "full":
        method, count = "uniform", actor.recompute_unit
        if actor.recompute_layers is not None:
            method, count = "block", actor.recompute_layers
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    kinds = {dims.kind_of(layer) for layer in range(dims.num_layers)}
    modules = actor.modules_of(has_dense=Layers.DENSE in kinds, has_experts=Layers.EXPERTS in kinds)
    # Megarl's CPU layers have no grouped GEMMs, within which alone Megatron recomputes these.
    modules = tuple(name for name in modules if name != "moe_act" or groups_experts)
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}


# `make_batch_invariant` needs these as well.
_INVARIANT: Mapping[str, object] = {
    "batch_invariant_mode": True,
    "attention_backend": AttnBackend.flash,
    # Newer Megatrons refuse any but the one whose order of sums they can set.
    "flash_attention_version": 3,
    # Where the gradient of a weight is added to those of earlier micro-batches, Megatron's kernel overwrites them.
    "gradient_accumulation_fusion": False,
}


def quick_gelu(gate: torch.Tensor) -> torch.Tensor:
    """Compute x·σ(1.702·x). Megatron's own function is compiled for every shape."""
    return gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS: dict[Activation, dict[str, object]] = {
    Activation.SILU: {"activation_func": F.silu},
    Activation.CLAMPED_SWIGLU: {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        # Megatron's fused kernel clamps before it adds the bias.
        "bias_activation_fusion": False,
    },
    # Megatron fuses the tanh approximation only under the name of the exact GELU.
    Activation.GELU_TANH: {
        "activation_func": functools.partial(F.gelu, approximate="tanh"),
        "bias_activation_fusion": False,
    },
}
