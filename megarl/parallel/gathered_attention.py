"""Let Transformer Engine compute the attention of rows that share prefixes: own queries, gathered keys of paths."""

import functools
from enum import Enum, auto

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.parallel.attention_plan import GatheredKeys
from megarl.parallel.packing import PackSeqParams


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
def gathering_attention() -> type:
    """Return the class of Transformer Engine's attention, extended by gathering keys and values where rows share them.

    It has been run on a GPU by itself, and in no whole model that passed.
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
