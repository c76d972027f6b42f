"""Choose the modules of each layer, among them attention over packs whose rows share prefixes by torch's FlexAttention,
and Megatron's self-attention with what some models do with queries and keys before their scores.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.host.device.platform import platform
from megarl.parallel.attention import PackedAttention, gathering_attention
from megarl.parallel.backend import BACKENDS, module_spec, packs_attention
from megarl.parallel.delta import set_delta_net
from megarl.parallel.latent import PackedLatentAttention, ReplicatedLinear
from megarl.parallel.moe.router import ExpertOutput, with_pack_routers
from megarl.parallel.norms import RMSNorm, WideNorm, set_norms
from megarl.parallel.packing import Pack
from megarl.parallel.path_blocks import PathBlocks
from megarl.weights.attention import AttentionOptions
from megarl.weights.families import ModelSpec
from megarl.weights.rules import Layers


class PathAttention(PackedAttention):
    """Attention as `PackedAttention` defines it, without caps, by the blocks of scores that a pack's paths need."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: Pack) -> torch.Tensor:
        assert pack.blocks is not None
        return attend_to_paths(
            query,
            key,
            value,
            pack.blocks,
            scale=self.softmax_scale,
            options=self.options,
            sinks=self.softmax_offset,
            attention=compiled_attention(),
        )


@functools.cache
def compiled_attention() -> Callable[..., Any]:
    """Return torch's FlexAttention as kernels for packs of any length, compiled when it is first called."""
    from torch.nn.attention.flex_attention import flex_attention

    # Models with windows and without, with gradients and without, each take kernels of their own.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def attend_to_paths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: PathBlocks,
    *,
    scale: float | None,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    attention: Callable[..., Any],
) -> torch.Tensor:
    """Return the outputs [T, heads·d] of query [T, heads, d], key and value [T, kv_heads, d] of a pack.

    attention: FlexAttention, compiled or not.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    assert options.score_cap is None
    out = attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        block_mask=blocks.mask(options.window),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        **({} if sinks is None else {"return_aux": AuxRequest(lse=True)}),
    )
    if sinks is not None:
        # One more score in the softmax, which adds nothing to the output.
        out, found = out
        out = out * (found.lse - sinks.float()[:, None]).sigmoid()[..., None].to(out.dtype)
    return out[0].transpose(0, 1).flatten(1)


class LayerAttention(SelfAttention):
    """Megatron's self-attention in a layer with rope of its own kind, or with norms over all heads together.

    Where layers have two kinds of rope, the angles [n, 1, 1, d] that Megatron passes to each of them are of twice as
    many frequencies: first those of layers that attend to all positions, then those of layers with a window.
    """

    def __init__(self, config: TransformerConfig, *, options: AttentionOptions, **named: object) -> None:
        if options.local_rope:
            config = copy.copy(config)
            # That of the other layers may belong to the scaling of their rope.
            config.softmax_scale = options.softmax_scale
        super().__init__(config, **named)
        self.local_rope = options.local_rope
        if options.wide_norms:
            heads = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
            widths = (number * self.hidden_size_per_attention_head for number in heads)
            self.q_layernorm, self.k_layernorm = (WideNorm(config, width, group=self.tp_group) for width in widths)

    def forward(
        self, hidden_states: torch.Tensor, *arguments: object, rotary_pos_emb: torch.Tensor, **named: object
    ) -> object:
        """Attend as Megatron does, with the angles of this layer's rope."""
        if self.local_rope is not None:
            rotary_pos_emb = rotary_pos_emb.unflatten(-1, (2, 2, -1))[..., int(self.local_rope), :].flatten(-2)
        return super().forward(hidden_states, *arguments, rotary_pos_emb=rotary_pos_emb, **named)


def set_self_attention(layer: ModuleSpec, options: AttentionOptions) -> None:
    """Set `LayerAttention` in the spec of a layer whose options need it, in place."""
    if options.local_rope is not None or options.wide_norms:
        attention = layer.submodules.self_attention
        attention.module, attention.params = LayerAttention, {**attention.params, "options": options}


def block_spec(
    spec: ModelSpec,
    config: TransformerConfig,
    vp_stage: int | None,
    *,
    shares_prefixes: bool = False,
    by_blocks: bool = False,
    packs_all: bool = False,
    has_adapters: bool = False,
) -> TransformerBlockSubmodules:
    """Return Megatron's spec of this pipeline stage's layers: Transformer Engine's or local ones, by device.

    shares_prefixes: whether rows do, for which Transformer Engine's attention gathers keys. by_blocks: whether
    attention is `PathAttention` instead; packs_all: whether it is megarl's in all layers. has_adapters: whether linear
    layers get some, which read what norms return.
    """
    if not BACKENDS[platform().name].uses_transformer_engine:
        return local_block_spec(spec, config, vp_stage, by_blocks=by_blocks)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for i, shared in enumerate(block.layer_specs):
        options, (_, attention) = spec.attention_of(first + i), spec.dims.kinds_of(first + i)
        layer = block.layer_specs[i] = copy.deepcopy(shared)
        if attention is Layers.LINEAR:
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            backend = TESpecProvider()
            set_delta_net(layer, spec.dims, backend.column_parallel_layer_norm_linear(), backend.row_parallel_linear())
        if has_adapters or not spec.family.norms_before:
            _separate_norms(layer)
        if attention is Layers.LINEAR:
            continue
        self_attention = layer.submodules.self_attention
        if by_blocks or packs_all or packs_attention(options, cp=config.context_parallel_size):
            self_attention.submodules.core_attention = _own_attention(options, by_blocks)
        elif shares_prefixes:
            self_attention.submodules.core_attention = gathering_attention()
        if shares_prefixes and isinstance(config, MLATransformerConfig):
            self_attention.module = PackedLatentAttention
        set_norms(layer, spec.family, config)
        set_self_attention(layer, options)
    with_pack_routers(block.layer_specs)
    return block


def local_block_spec(
    spec: ModelSpec, config: TransformerConfig, vp_stage: int | None = None, *, by_blocks: bool = False
) -> TransformerBlockSubmodules:
    """Return the spec of this stage's layers: Megatron's local ones with megarl's norm, attention and router."""
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    # Layers of one kind share a spec.
    kinds = [(*spec.dims.kinds_of(layer), spec.attention_of(layer)) for layer in range(first, first + num_layers)]
    specs = {kind: _local_layer_spec(spec, config, *kind, by_blocks=by_blocks) for kind in kinds}
    for (_, attention, options), layer in specs.items():
        set_norms(layer, spec.family, config)
        if attention is not Layers.LINEAR:
            set_self_attention(layer, options)
    with_pack_routers(specs.values())
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=RMSNorm)


# The linear layers that Transformer Engine has together with a norm before them, and the name of that norm by itself.
_NORMED = {
    "linear_qkv": "input_layernorm",
    "in_proj": "input_layernorm",
    "linear_q_up_proj": "q_layernorm",
    "linear_kv_up_proj": "kv_layernorm",
    "linear_fc1": "pre_mlp_layernorm",
}


def _separate_norms(layer: ModuleSpec) -> None:
    """Set linear layers and the norms before them apart in the spec of a layer of Transformer Engine, in place.

    This costs nothing: except in float8, Transformer Engine computes both by the same two kernels when they are one
    layer, and keeps the same tensors for backward, if the linear layer's input is needed there.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    for part in (layer.submodules.self_attention, module_spec(layer.submodules.mlp)):
        for linear, norm in _NORMED.items():
            if getattr(part.submodules, linear, None) not in (None, TEColumnParallelLinear):
                setattr(part.submodules, linear, TEColumnParallelLinear)
                setattr(part.submodules if hasattr(part.submodules, norm) else layer.submodules, norm, TENorm)


def _own_attention(options: AttentionOptions, by_blocks: bool) -> ModuleSpec:
    return ModuleSpec(module=PathAttention if by_blocks else PackedAttention, params={"options": options})


def _local_layer_spec(
    model: ModelSpec,
    config: TransformerConfig,
    mlp: Layers,
    attention_kind: Layers,
    options: AttentionOptions,
    *,
    by_blocks: bool,
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
        module_spec(module_spec(spec.submodules.mlp).submodules.experts).submodules.linear_fc2 = ExpertOutput
    if attention_kind is Layers.LINEAR:
        set_delta_net(spec, model.dims, ColumnParallelLinear, RowParallelLinear)
        return spec
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = _own_attention(options, by_blocks)
    if latent:
        spec.submodules.self_attention.module = PackedLatentAttention
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        assert attention.q_layernorm is not IdentityOp
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
