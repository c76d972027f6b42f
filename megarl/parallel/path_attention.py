"""Define attention over packs whose rows share prefixes by torch's FlexAttention: one kernel over the whole pack."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megarl.parallel.attention import PackedAttention
from megarl.parallel.packing import Pack
from megarl.parallel.path_blocks import PathBlocks
from megarl.weights.attention import AttentionOptions


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
