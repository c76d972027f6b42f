"""Run gated delta nets (Yang et al. 2024, arXiv:2412.06464), which replace attention in some layers, on packs.

A head keeps a state S [d, e] that maps keys to values. Each token lets it fade, corrects what it returns for the
token's key, and reads it:

    S' = e^g S        S = S' + β k (v − kᵀS')ᵀ        o = qᵀS / √d        with g ≤ 0, 0 < β < 1, |q| = |k| = 1

A convolution over the last few tokens precedes q, k and v. Every row of a pack starts from an empty state, so the rows
of an `AttentionCall` are computed together, each with the whole of what it shares with others.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from megarl.parallel.attention_plan import AttentionCall
from megarl.parallel.packing import PackSeqParams
from megarl.weights.dims import DeltaNet, Dims

_CHUNK = 64
# FLA's kernels, like transformers, add this to the squared norms of queries and keys.
_NORM_EPS = 1e-6

# The q, k [S, n, H, d], v [S, n, H, e], g and β [S, n, H] of the rows of a call.
DeltaRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# It returns the outputs [tokens, H, e] of the rows of all calls, end to end.
DeltaKernel = Callable[[Sequence[DeltaRows]], torch.Tensor]


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the outputs o [S, n, H, e] of rows that start from an empty state, 64 tokens at a time.

    Within a chunk, the corrections u = v − kᵀS' solve a triangular system, since each depends on those before it; what
    the state at the chunk's beginning adds is known for all its tokens at once.
    """
    num_tokens, padding = q.shape[1], -q.shape[1] % _CHUNK
    # [S, H, chunks, 64, …].
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, padding)).unflatten(2, (-1, _CHUNK)) for x in (q, k, v))
    decay, beta = (F.pad(x.transpose(1, 2), (0, padding)).unflatten(2, (-1, _CHUNK)) for x in (decay, beta))
    # In float32, differences between sums of many decays would lose the digits that count.
    total = decay.double().cumsum(-1)
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).triu(1)
    # How far the state fades from token j to token i ≥ j; masked before the exponential, which may overflow for i < j.
    fading = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp().to(q.dtype)
    since_start, until_end = total.exp().to(q.dtype), (total[..., -1:] - total).exp().to(q.dtype)
    weighted = k * beta.unsqueeze(-1)
    # Its diagonal is taken to be 1.
    system = weighted @ k.transpose(-1, -2) * fading
    known = torch.cat([v * beta.unsqueeze(-1), weighted * since_start.unsqueeze(-1)], -1)
    values, keys = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    q = q * q.shape[-1] ** -0.5
    within, across = q @ k.transpose(-1, -2) * fading, q * since_start.unsqueeze(-1)
    added = (k * until_end.unsqueeze(-1)).transpose(-1, -2)
    state, outputs = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]), []
    for i in range(q.shape[2]):
        corrections = values[:, :, i] - keys[:, :, i] @ state
        outputs.append(across[:, :, i] @ state + within[:, :, i] @ corrections)
        state = state * since_start[:, :, i, -1, None, None] + added[:, :, i] @ corrections
    return torch.cat(outputs, 2)[:, :, :num_tokens].transpose(1, 2)


def run_calls(calls: Sequence[DeltaRows]) -> torch.Tensor:
    """Compute the rows of each call by `delta_rule`."""
    return torch.cat([delta_rule(*rows).flatten(0, 1) for rows in calls])


def run_fused(
    calls: Sequence[DeltaRows], rule: Callable[..., tuple[torch.Tensor, ...]], dtype: torch.dtype
) -> torch.Tensor:
    """Compute all rows by one call of `rule`, FLA's `chunk_gated_delta_rule`, which wants them end to end."""
    lengths = [q.shape[1] for q, *_ in calls for _ in range(len(q))]
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(calls[0][0].device)
    q, k, v, decay, beta = (torch.cat([x.flatten(0, 1) for x in each])[None] for each in zip(*calls, strict=True))
    outputs: torch.Tensor = rule(q.to(dtype), k.to(dtype), v.to(dtype), g=decay, beta=beta, cu_seqlens=bounds)[0]
    return outputs[0]


@functools.cache
def choose_kernel(device: torch.device, dtype: torch.dtype) -> DeltaKernel:
    """Return FLA's kernel where it is installed (flash-linear-attention), on CUDA and in 16 bits, which it requires."""
    if device.type != "cuda" or dtype is torch.float32 or find_spec("fla") is None:
        return run_calls
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda calls: run_fused(calls, chunk_gated_delta_rule, dtype)


class PackedDeltaNet(MegatronModule):
    """A gated delta net over packs, in place of a layer's attention.

    Tensor-parallel ranks divide the key heads, each with the value heads that belong to it. So parameters are ordered
    by key head: a head's rows of `in_proj` are its q, k, v, output gates, βs and decays; those of `conv1d_weight` its
    q, k and v.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        sizes: DeltaNet,
        **_: object,
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None
        assert pg_collection.cp.size() == 1, "gated delta nets need whole rows"
        self.tp_group, self.layer_number, self.sizes = pg_collection.tp, layer_number, sizes
        size = self.tp_group.size()
        self.num_keys, self.num_values = sizes.num_key_heads // size, sizes.num_value_heads // size
        # Value heads per key head.
        self.ratio = sizes.num_value_heads // sizes.num_key_heads
        self.width = 2 * sizes.key_dim + self.ratio * sizes.value_dim
        options = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sizes.num_key_heads * (self.width + self.ratio * (sizes.value_dim + 2)),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **options,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            sizes.num_value_heads * sizes.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **options,
        )

        def parameter(*shape: int, split: bool) -> torch.nn.Parameter:
            made = torch.nn.Parameter(torch.zeros(*shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(made, is_parallel=split, dim=0 if split else -1, stride=1)
            return made

        self.conv1d_weight = parameter(self.num_keys * self.width, 1, sizes.conv_width, split=True)
        self.A_log, self.dt_bias = (parameter(self.num_values, split=True) for _ in range(2))
        self.norm_weight = parameter(sizes.value_dim, split=False)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None = None, *, packed_seq_params: object = None, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs [T, 1, H] of hidden states [T, 1, H] (a part of each under sequence parallelism)."""
        assert isinstance(packed_seq_params, PackSeqParams), "PackedDeltaNet needs packed sequences"
        assert packed_seq_params.pack is not None
        plan, value_dim, dtype = packed_seq_params.pack.attention, self.sizes.value_dim, hidden_states.dtype
        assert plan is not None
        projected = self.in_proj(hidden_states)[0][:, 0].unflatten(-1, (self.num_keys, -1))
        qkv, gate, beta, decay = (
            x.flatten(1) for x in projected.split([self.width, self.ratio * value_dim, self.ratio, self.ratio], -1)
        )
        beta = beta.float().sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias.float())
        kernel = choose_kernel(hidden_states.device, dtype)
        every = kernel([self._rows(call, qkv, decay, beta) for call in plan.calls])
        by_call = every.split([call.keys.numel() for call in plan.calls])
        last = [
            out.unflatten(0, call.keys.shape)[:, -call.queries.shape[1] :].flatten(0, 1)
            for out, call in zip(by_call, plan.calls, strict=True)
        ]
        out = torch.cat(last)[plan.places].float()
        # Each rank has other heads, so the gradient is summed over ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        out = F.rms_norm(out, (value_dim,), eps=self.config.layernorm_epsilon).to(dtype) * weight
        out = (out * F.silu(gate.unflatten(1, (-1, value_dim)).float())).to(dtype)
        result: tuple[torch.Tensor, torch.Tensor | None] = self.out_proj(out.flatten(1).unsqueeze(1))
        return result

    def _rows(self, call: AttentionCall, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> DeltaRows:
        """Gather the tokens of a call's rows, and make their q, k and v of these and the tokens before."""
        sizes, rows = self.sizes, qkv[call.keys].transpose(1, 2)
        before = self.conv1d_weight.shape[-1] - 1
        mixed = F.silu(F.conv1d(F.pad(rows, (before, 0)), self.conv1d_weight, groups=rows.shape[1])).transpose(1, 2)
        q, k, v = (
            mixed.unflatten(-1, (self.num_keys, -1))
            .float()
            .split([sizes.key_dim, sizes.key_dim, self.ratio * sizes.value_dim], -1)
        )
        q, k = (
            (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)).repeat_interleave(self.ratio, 2)
            for x in (q, k)
        )
        return q, k, v.flatten(2).unflatten(2, (-1, sizes.value_dim)), decay[call.keys], beta[call.keys]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Describe the parameters for checkpoints; Megatron's method would take all but the projections for whole."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        states: dict[str, object] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        names = ("conv1d_weight", "A_log", "dt_bias")
        return states | make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in names},
            prefix,
            dict.fromkeys(names, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def set_delta_net(layer: ModuleSpec, dims: Dims, in_proj: type, out_proj: type) -> None:
    """Put a gated delta net in the place of a layer's attention, with these classes of parallel linear layers.

    Checkpoints have the norm before it under the name that it has where `in_proj` is fused with it.
    """
    layer.submodules.self_attention = ModuleSpec(
        module=PackedDeltaNet,
        params={"sizes": dims.delta},
        submodules=GatedDeltaNetSubmodules(in_proj=in_proj, out_proj=out_proj),
    )
    layer.submodules.sharded_state_dict_keys_map = {
        **layer.submodules.sharded_state_dict_keys_map,
        "input_layernorm.": "self_attention.in_proj.layer_norm_",
    }


def delta_options(dims: Dims) -> dict[str, object]:
    """Return the fields of Megatron's configuration for gated delta nets, or {} for a model without them."""
    if dims.delta is None:
        return {}
    # Else Megatron would take all layers for equal, and stack them in checkpoints.
    return {"linear_attention_freq": [int(layer in dims.delta.layers) for layer in range(dims.num_layers)]}
