"""Let Transformer Engine compute the attention of rows that share prefixes: own queries, gathered keys of paths."""

import functools
import itertools
import os
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType

from megarl.host.device.platform import platform
from megarl.parallel.attention import PackedAttention
from megarl.parallel.attention_plan import GatheredKeys
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
