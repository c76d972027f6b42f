"""Define causal attention within each row of a pack, with the options of a layer that Megatron's attention lacks."""

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch.utils.checkpoint import checkpoint

from megarl.parallel.attention_plan import AttentionCall
from megarl.parallel.packing import Pack, PackSeqParams
from megarl.parallel.sinks import attend_with_sinks
from megarl.weights.attention import AttentionOptions

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
