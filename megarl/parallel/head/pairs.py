"""Compute the exact KL between two distributions over the vocabulary: with a hint in the prompt and without.

Every row has a twin, the same response after another prompt. For hidden states h of a twin and g of its row under one
output weight W and temperature T, z = h·Wᵀ/T, u = g·Wᵀ/T:

    KL(softmax z ‖ softmax u) = Σ_v p_v (z_v − u_v) − lse(z) + lse(u)   (nats).

Besides the statistics of z and u, each rank computes d_i, the mean of z − u under the local softmax of z. One
all-gather of seven floats per pair then gives the exact KL, without gathering the vocabulary: with the shards' masses
m_i = e^{lse_i(z) − lse(z)},  KL = Σ_i m_i d_i − lse(z) + lse(u).
"""

from dataclasses import dataclass

import torch

from megarl.parallel.head.statistics import HeadInputs, combine, gather_parts, write_chunk_statistics

# Float32 numbers of the rows whose differences are computed at a time.
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPairs:
    """Log-probs, entropies and KLs [N], float32 in nats, of rows and their twins (the same responses after another
    prompt).

    The pack has all rows first, then all twins. kl: KL(twin ‖ row) at the labels of a row, 0 at the labels of a twin.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor


@torch.no_grad()
def pair_statistics(x: HeadInputs, first: torch.Tensor, second: torch.Tensor) -> TokenPairs:
    """Compute log-probs and entropies at the token positions `first` and `second` [P] of x, and KL(second ‖ first) at
    `first`.
    """
    parts = torch.zeros(7, len(first), dtype=x.statistics_dtype, device=x.hidden.device)
    rows, twins = x.rows(first), x.rows(second)
    size = min(x.chunk_tokens, len(first))
    row_buffer, twin_buffer = x.buffer(size), x.buffer(size)
    for chunk in rows.chunks():
        row_logits, twin_logits = rows.write_logits(chunk, row_buffer), twins.write_logits(chunk, twin_buffer)
        write_chunk_statistics(rows, chunk, row_logits, parts[:3, chunk])
        write_chunk_statistics(twins, chunk, twin_logits, parts[3:6, chunk])
        if x.shard.size:
            parts[6, chunk] = _mean_difference(twin_logits, row_logits, rows.inverse_temperature[chunk])
    gathered = gather_parts(parts, x.shard.group)
    of_rows, of_twins = combine(gathered[:, :3]), combine(gathered[:, 3:6])
    mass = torch.exp(gathered[:, 3] - of_twins.lse)
    kl = (mass * gathered[:, 6]).sum(0) - of_twins.lse + of_rows.lse

    def place(at_first: torch.Tensor, at_second: torch.Tensor) -> torch.Tensor:
        return at_first.new_empty(len(x.hidden)).index_copy_(0, first, at_first).index_copy_(0, second, at_second)

    return TokenPairs(
        logprobs=place(of_rows.logprobs, of_twins.logprobs),
        entropy=place(of_rows.entropy, of_twins.entropy),
        # Round-off may leave a tiny negative number where the two agree.
        kl=place(kl.clamp(min=0), torch.zeros_like(kl)),
    )


def _mean_difference(logits: torch.Tensor, others: torch.Tensor, inverse_temperature: torch.Tensor) -> torch.Tensor:
    """Return Σ_v softmax(z)_v (z_v − u_v) [n] over one vocabulary shard, from raw logits [n, V] of z and u."""
    size = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    means = []
    for z, u, scale in zip(logits.split(size), others.split(size), inverse_temperature.split(size), strict=True):
        wide = z * scale[:, None]
        means.append((wide.softmax(1) * (wide - u * scale[:, None])).sum(1))
    return torch.cat(means)
