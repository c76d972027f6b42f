"""Choose each layer's modules, and define an RMSNorm for sequence parallelism, which Megatron's local spec lacks."""

import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.host.device.platform import platform
from megarl.parallel.attention import PackedAttention
from megarl.parallel.backend import BACKENDS, packs_attention
from megarl.parallel.delta import set_delta_net
from megarl.parallel.latent import ReplicatedLinear
from megarl.parallel.moe.router import with_pack_routers
from megarl.parallel.moe.setup import ExpertOutput
from megarl.weights.attention import AttentionOptions
from megarl.weights.families import ModelSpec
from megarl.weights.rules import Layers


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm, y = scale · (x / sqrt(mean(x²) + ε)); it saves only x and one number per row for backward.

    With u = x / sqrt(mean(x²) + ε) and v = scale · dy:  dx = (v − u · mean(u · v)) / sqrt(mean(x²) + ε), and
    dscale = Σ dy · u. The forward pass rounds u to the dtype of `scale` before multiplying it by `scale`.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        inverse = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, inverse)
        return ((wide * inverse).to(scale.dtype) * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scale, inverse = ctx.saved_tensors
        gradient, normed = gradients[0].float(), x.float() * inverse
        of_scale = (gradient * normed).flatten(0, -2).sum(0)
        of_normed = gradient * scale.float()
        mean = torch.linalg.vecdot(of_normed, normed).unsqueeze(-1) / x.shape[-1]
        return of_normed.sub_(normed.mul_(mean)).mul_(inverse).to(x.dtype), of_scale.to(scale.dtype), None


class RMSNorm(torch.nn.Module):
    """RMSNorm y = w · x / sqrt(mean(x²) + ε) over the last dimension (Zhang & Sennrich 2019); statistics are float32.

    If Megatron's configuration centres norm weights at zero (Gemma), 1 + w replaces w, in float32. Under sequence
    parallelism each rank sees only part of the tokens; so the weight is marked for Megatron to all-reduce its gradient
    over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.adds_one = eps, config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.adds_one else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + self.weight.float() if self.adds_one else self.weight
        normed: torch.Tensor = _RMSNormFunction.apply(x, scale, self.eps)
        return normed


def block_spec(spec: ModelSpec, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's spec of this pipeline stage's layers: Transformer Engine's or local ones, by device."""
    if not BACKENDS[platform().name].uses_transformer_engine:
        return local_block_spec(spec, config, vp_stage)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for i, shared in enumerate(block.layer_specs):
        options, (_, attention) = spec.attention_of(first + i), spec.dims.kinds_of(first + i)
        if attention is Layers.LINEAR:
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            backend, layer = TESpecProvider(), copy.deepcopy(shared)
            set_delta_net(layer, spec.dims, backend.column_parallel_layer_norm_linear(), backend.row_parallel_linear())
            block.layer_specs[i] = layer
        elif packs_attention(options, cp=config.context_parallel_size):
            layer = block.layer_specs[i] = copy.deepcopy(shared)
            layer.submodules.self_attention.submodules.core_attention = _packed_attention(options)
    with_pack_routers(block.layer_specs)
    return block


def local_block_spec(
    spec: ModelSpec, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of this stage's layers: Megatron's local ones with megarl's norm, attention and router."""
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    # Layers of one kind share a spec.
    kinds = [(*spec.dims.kinds_of(layer), spec.attention_of(layer)) for layer in range(first, first + num_layers)]
    specs = {kind: _local_layer_spec(spec, config, *kind) for kind in kinds}
    with_pack_routers(specs.values())
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=RMSNorm)


def _packed_attention(options: AttentionOptions) -> ModuleSpec:
    return ModuleSpec(module=PackedAttention, params={"options": options})


def _local_layer_spec(
    model: ModelSpec, config: TransformerConfig, mlp: Layers, attention_kind: Layers, options: AttentionOptions
) -> ModuleSpec:
    latent = isinstance(config, MLATransformerConfig)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if mlp is Layers.EXPERTS else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization=config.normalization,
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    if mlp is Layers.EXPERTS and config.add_bias_linear:
        spec.submodules.mlp.submodules.experts.submodules.linear_fc2 = ExpertOutput
    if attention_kind is Layers.LINEAR:
        set_delta_net(spec, model.dims, ColumnParallelLinear, RowParallelLinear)
        return spec
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = _packed_attention(options)
    if latent:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        assert attention.q_layernorm is not IdentityOp
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
