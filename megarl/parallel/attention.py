"""Define causal attention within each row of a pack, with the options of a layer that Megatron's attention lacks."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.parallel.packing import AttentionCall, PackSeqParams
from megarl.weights.attention import AttentionOptions


class PackedAttention(torch.nn.Module):
    """Causal attention within each row of a pack, on torch's scaled_dot_product_attention.

    query [T, heads, d], key and value [T, kv_heads, d] → [T, heads·d]; the pack's `AttentionPlan` says which tokens
    each call takes. Rows that share a prompt are attended with the whole prompt each. A window counts positions of the
    row. Under context parallelism, keys
    and values are gathered over the group, and each rank computes the outputs of its own (zigzag) queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        options: AttentionOptions,
        **_: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        self.softmax_scale, self.cp_group, self.options = softmax_scale, pg_collection.cp, options

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
            seen = seen_keys(call, self.options.window)
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


def seen_keys(call: AttentionCall, window: int | None) -> torch.Tensor | None:
    """Return which keys [n, m] each query of a call sees within a window; None: query i sees keys 0 to i."""
    num_keys = call.keys.shape[1]
    if window is None or window >= num_keys:
        return call.seen
    seen = call.seen
    if seen is None:
        seen = torch.ones(num_keys, num_keys, dtype=torch.bool, device=call.keys.device).tril()
    # Without a window, a query sees one key more than its position in the row.
    first = seen.sum(-1, keepdim=True) - window
    return seen & (torch.arange(num_keys, device=seen.device) >= first)
