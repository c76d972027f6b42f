"""Compute attention with sinks: one learned score per head that takes part in the softmax and adds no value."""

import torch
import torch.nn.functional as F

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
