"""Define causal attention within each row of a pack, with the options of a layer that Megatron's attention lacks, and
let Transformer Engine compute that of rows that share prefixes: own queries, gathered keys of paths.
"""

import functools
import itertools
import os
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch.utils.checkpoint import checkpoint

from megarl.host.device.platform import platform
from megarl.parallel.attention_plan import AttentionCall, GatheredKeys
from megarl.parallel.packing import Pack, PackAlignment, PackSeqParams, pack_rows
from megarl.types import Row
from megarl.weights.attention import AttentionOptions

# How far outputs and gradients may be from those in float32, of their norm: what roundings of 16 bits make, doubled.
_TOLERANCE = 0.02


class PathMask(Enum):
    """The mask, by Transformer Engine's name, in which the queries of a row are the last of its keys."""

    padding_causal_bottom_right = auto()


def gathered_params(gathered: GatheredKeys) -> PackedSeqParams:
    """Return the bounds of queries and of gathered keys as Megatron passes them to attention."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=gathered.query_bounds,
        cu_seqlens_kv=gathered.key_bounds,
        cu_seqlens_q_padded=gathered.query_bounds,
        cu_seqlens_kv_padded=gathered.key_bounds,
        max_seqlen_q=gathered.max_queries,
        max_seqlen_kv=gathered.max_keys,
    )


@functools.cache
def gathering_attention() -> type[Any]:
    """Return the class of Transformer Engine's attention, extended by gathering keys and values where rows share them.

    It has been run on a GPU by itself, and in no whole model that passed; `gathering_obstacle` tries it.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class GatheringAttention(TEDotProductAttention):
        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: None,
            attn_mask_type: object,
            packed_seq_params: PackedSeqParams,
            **named: object,
        ) -> torch.Tensor:
            assert isinstance(packed_seq_params, PackSeqParams)
            assert packed_seq_params.pack is not None
            if (gathered := packed_seq_params.pack.gathered) is not None:
                key, value = (each.index_select(0, gathered.keys) for each in (key, value))
                packed_seq_params = gathered_params(gathered)
                attn_mask_type = PathMask.padding_causal_bottom_right
            attended: torch.Tensor = super().forward(
                query, key, value, attention_mask, attn_mask_type, packed_seq_params=packed_seq_params, **named
            )
            return attended

    return GatheringAttention


def gathering_obstacle(chunks: Iterable[torch.nn.Module], groups: ProcessGroupCollection) -> str | None:
    """Return in one line why Transformer Engine cannot compute a model's attention over gathered keys, or None.

    Its kernels are tried on three rows with a common prompt, forward and backward. It falls back to unfused attention
    without a word, which fails with such keys; so that is ruled out here.
    """
    modules: Iterable[Any] = itertools.chain(*(chunk.modules() for chunk in chunks))
    # Layers of one kind have the same kernels.
    found = {each.window_size: each for each in modules if type(each) is gathering_attention()}
    tokens = [np.repeat([0, length], [70, length]).astype(np.int32) for length in (9, 40, 130)]
    rows = [
        Row(uid="", sample_index=i, token_ids=each, num_prompt_tokens=70, loss_mask=each[70:] > 0)
        for i, each in enumerate(tokens)
    ]
    device = platform().device()
    pack = pack_rows(
        rows, alignment=PackAlignment(), device=device, plans_attention=True, shares_prefixes=True, gathers_keys=True
    )
    try:
        with patch.dict(os.environ, NVTE_UNFUSED_ATTN="0"), torch.enable_grad():
            errors = [_error(attention, pack, groups) for attention in found.values()]
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    # A comparison with NaN is false.
    return next((f"its results are off by {each:.1%}" for each in errors if not each <= _TOLERANCE), None)


def _error(attention: Any, pack: Pack, groups: ProcessGroupCollection) -> float:
    """Return the largest relative error of a layer's outputs and gradients on random queries, keys and values."""
    window, dtype, generator = attention.window_size[0], attention.config.params_dtype, torch.Generator().manual_seed(0)
    heads, key_heads = attention.num_attention_heads // attention.tp_size, attention.num_gqa_groups_per_partition
    width, value_width = attention.hidden_size_per_attention_head_k, attention.hidden_size_per_attention_head_v
    options = AttentionOptions(window=None if window < 0 else window + 1)
    ours = PackedAttention(attention.config, 1, attention.fused_attention.softmax_scale, groups, options=options)

    def random(*shape: int) -> torch.Tensor:
        made = torch.randn(pack.input_ids.shape[1], *shape, generator=generator)
        return made.to(device=pack.input_ids.device, dtype=dtype)

    given = [random(heads, width), random(key_heads, width), random(key_heads, value_width)]
    weights, results = random(heads * value_width), []
    for module, number in ((attention, dtype), (ours, torch.float32)):
        inputs = [each.to(number).requires_grad_() for each in given]
        out = module(*inputs, None, AttnMaskType.padding_causal, packed_seq_params=pack.packed_seq_params).flatten(1)
        results.append([out, *torch.autograd.grad(out, inputs, weights.to(number))])
    # If one is NaN, so is the largest.
    return float(torch.stack([(a.float() - b).norm() / b.norm() for a, b in zip(*results, strict=True)]).max())


# Fused kernels want widths that 8 divides.
_WIDER = 8


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Return softmax([scale·q·kᵀ, sinks])·[v, 0]: [S, heads, n, d] for query [S, heads, n, d], key and value [S,
    kv_heads, m, d] and sinks [heads].

    A sink is the score of one more key, put first. Two more dimensions, in which this key is 1 and others are 0, give
    each query the sink of its head: rounded, and the remainder. So torch's fused attention computes it, with gradients
    for the sinks. seen: [n, m] which keys each query sees; None: query i sees keys 0 to i, and one more query is put
    first, so that the scores stay causal without a mask.
    """
    (*_, n, d), causal = query.shape, seen is None
    scale = d**-0.5 if scale is None else scale
    scores = sinks.double() / scale
    rounded = scores.to(query.dtype)
    own = torch.stack([rounded, (scores - rounded).to(query.dtype)], dim=-1)
    query = torch.cat([query, F.pad(own, (0, _WIDER - 2))[:, None].expand(*query.shape[:-1], -1)], dim=-1)
    sink_key = torch.zeros(d + _WIDER, dtype=key.dtype, device=key.device)
    sink_key[d : d + 2] = 1
    key = torch.cat([sink_key.expand(*key.shape[:2], 1, -1), F.pad(key, (0, _WIDER))], dim=2)
    out = F.scaled_dot_product_attention(
        F.pad(query, (0, 0, 1, 0)) if causal else query,
        key,
        F.pad(value, (0, _WIDER, 1, 0)),
        attn_mask=None if seen is None else F.pad(seen, (1, 0), value=True),
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[..., -n:, :d]


# Capped scores that are computed at a time.
_SCORE_BLOCK = 1 << 24


class PackedAttention(torch.nn.Module):
    """Causal attention within each row of a pack, on torch's scaled_dot_product_attention.

    query [T, heads, d], key and value [T, kv_heads, d] → [T, heads·d]; the pack's `AttentionPlan` says which tokens
    each call takes. Rows that share a prefix see all of it, and a window counts positions of the row. Under context
    parallelism, keys and values are gathered over the group, and each rank computes the outputs of its own (zigzag)
    queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        options: AttentionOptions,
        **_: object,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.softmax_scale, self.cp_group, self.options = softmax_scale, pg_collection.cp, options
        self.softmax_offset = None
        if options.sinks:
            # Named as in Megatron's own attention, whose checkpoints have it.
            self.tp_group = pg_collection.tp
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Describe the sinks for checkpoints: each rank has those of its heads."""
        if self.softmax_offset is None:
            return {}
        shards: dict[str, object] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return shards

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: object = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        assert isinstance(packed_seq_params, PackSeqParams), "PackedAttention needs packed sequences"
        assert packed_seq_params.pack is not None
        return self.attend(query, key, value, packed_seq_params.pack)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: Pack) -> torch.Tensor:
        """Return the outputs of a pack's tokens, call by call of its plan."""
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
            seen = seen_keys(call, self.options.window, whole_images=self.options.whole_images)
            if self.softmax_offset is not None:
                out = attend_with_sinks(q, k, v, self.softmax_offset, seen, self.softmax_scale)
            elif (cap := self.options.score_cap) is not None:
                out = capped_attention(q, k, v, seen, scale=self.softmax_scale or q.shape[-1] ** -0.5, cap=cap)
            else:
                out = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=seen,
                    is_causal=seen is None,
                    scale=self.softmax_scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            outputs.append(out.transpose(1, 2).reshape(call.queries.numel(), -1))
        return torch.cat(outputs).index_select(0, pack.attention.places)


def capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, *, scale: float, cap: float
) -> torch.Tensor:
    """Attend with scores s capped to cap·tanh(s/cap) (Gemma 2), which torch's attention does not compute.

    q [S, heads, n, d], k and v [S, kv_heads, m, d]; seen as in `seen_keys`. Scores are float32, of a block of queries
    at a time, and backward computes them again.
    """
    num_rows, num_heads, num_queries, _ = q.shape
    num_keys, num_kv_heads = k.shape[2], k.shape[1]
    if seen is None:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        scores = q @ k[:, :, None].transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores.mul(scale / cap).tanh().mul(cap).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1).to(v.dtype) @ v[:, :, None]

    size = max(1, _SCORE_BLOCK // (num_rows * num_heads * num_keys))
    # Heads that share a key are a dimension of their own.
    blocks = zip(q.unflatten(1, (num_kv_heads, -1)).split(size, 3), seen.split(size), strict=True)
    outputs = [
        checkpoint(attend, block, k, v, its, use_reentrant=False, preserve_rng_state=False) for block, its in blocks
    ]
    return torch.cat(outputs, 3).flatten(1, 2)


def seen_keys(call: AttentionCall, window: int | None, *, whole_images: bool = False) -> torch.Tensor | None:
    """Return which keys [n, m] each query of a call sees within a window; None: query i sees keys 0 to i.

    whole_images: queries see all keys of their image as well, which depends on the row: [S, 1, n, m].
    """
    num_keys, within = call.keys.shape[1], call.within if whole_images else None
    is_local = window is not None and window < num_keys
    if within is None and not is_local:
        return call.seen
    seen = call.seen
    if seen is None:
        seen = torch.ones(num_keys, num_keys, dtype=torch.bool, device=call.keys.device).tril()
    # Without a window, a query sees one key more than its position in the row.
    first = seen.sum(-1, keepdim=True) - (window or 0)
    if within is not None:
        seen = (seen | within)[:, None]
    return seen & (torch.arange(num_keys, device=seen.device) >= first) if is_local else seen
