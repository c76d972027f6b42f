"""Define layers that Megatron's local spec lacks: an RMSNorm for sequence parallelism and packed causal attention."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.host.device.platform import platform
from megarl.parallel.backend import BACKENDS
from megarl.parallel.latent import ReplicatedLinear
from megarl.parallel.moe.router import with_pack_routers
from megarl.parallel.packing import PackSeqParams


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


class PackedAttention(torch.nn.Module):
    """Causal attention within each row of a pack, on torch's scaled_dot_product_attention.

    query [T, heads, d], key and value [T, kv_heads, d] → [T, heads·d]; the pack's `AttentionPlan` says which tokens
    each call takes. Rows that share a prompt are attended with the whole prompt each. Under context parallelism, keys
    and values are gathered over the group, and each rank computes the outputs of its own (zigzag) queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.softmax_scale, self.cp_group = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        assert isinstance(packed_seq_params, PackSeqParams), "PackedAttention needs packed sequences"
        pack = packed_seq_params.pack
        assert pack is not None
        assert pack.attention is not None
        if self.cp_group.size() > 1:
            # The gradients of keys and values are summed over ranks.
            key, value = (gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (key, value))
        outputs = []
        for call in pack.attention.calls:
            # [S, heads, n or m, d].
            q, k, v = (
                x.index_select(0, places.flatten()).view(*places.shape, *x.shape[1:]).transpose(1, 2)
                for x, places in ((query, call.queries), (key, call.keys), (value, call.keys))
            )
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=call.seen,
                is_causal=call.seen is None,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(out.transpose(1, 2).reshape(call.queries.numel(), -1))
        return torch.cat(outputs).index_select(0, pack.attention.places)


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's spec of this pipeline stage's layers: Transformer Engine's or local ones, by device."""
    if not BACKENDS[platform().name].uses_transformer_engine:
        return local_block_spec(config, vp_stage)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    with_pack_routers(block.layer_specs)
    return block


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the spec of this stage's layers: Megatron's local ones with megarl's norm, attention and router."""
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    pattern = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
    with_experts = [config.num_moe_experts is not None and kind == 1 for kind in pattern[first : first + num_layers]]
    kinds = {kind: _local_layer_spec(config, config.num_moe_experts if kind else None) for kind in with_experts}
    with_pack_routers(kinds.values())
    layers = [kinds[kind] for kind in with_experts]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _local_layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    latent = isinstance(config, MLATransformerConfig)
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization=config.normalization,
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if latent:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        assert attention.q_layernorm is not IdentityOp
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
