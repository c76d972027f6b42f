"""KL between two next-token distributions over the whole vocabulary, on tensor-parallel-sharded logits.

For hidden states h and g of the same token under one output weight W and temperature T, z = h·Wᵀ/T, u = g·Wᵀ/T:

    KL(softmax z ‖ softmax u) = Σ_v p_v (z_v − u_v) − lse(z) + lse(u)   (nats).

Each rank computes three float32 numbers per row over its shard of the vocabulary: the local lse(z), lse(u), and the
mean of z − u under the local softmax of z. One all-gather of [3, N] gives the KL exactly: with the shards' masses
m_i = e^{lse_i(z) − lse(z)}, KL = Σ_i m_i d_i − lse(z) + lse(u). The vocabulary is never gathered.
"""

import torch
import torch.distributed as dist

from megarl.parallel.logprobs import VocabShard, chunk_logits
from megarl.parallel.packing import Pack


@torch.no_grad()
def vocab_parallel_kl(
    hidden: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: float,
    chunk_tokens: int = 1024,
    fp32_logits: bool = False,
) -> torch.Tensor:
    """[N] KL(p_hidden ‖ p_other) from hidden states [N, H] and this rank's rows of the output weight, no graph.

    Arguments are those of `vocab_parallel_logprobs`; `hidden` and `other` are the same on every rank of the group.
    """
    if hidden.shape != other.shape:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, other {tuple(other.shape)}; they must agree")
    if fp32_logits:
        hidden, other, weight = hidden.float(), other.float(), weight.float()
    inverse_temperature = torch.full(hidden.shape[:1], 1 / temperature, dtype=torch.float32, device=hidden.device)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    stats = torch.zeros(3, hidden.shape[0], dtype=wide, device=hidden.device)
    if shard.size == 0:
        stats[:2] = -torch.inf
    else:
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = chunk_logits(hidden, weight[: shard.size], inverse_temperature, rows)
            others = chunk_logits(other, weight[: shard.size], inverse_temperature, rows)
            stats[0, rows], stats[1, rows] = logits.logsumexp(1), others.logsumexp(1)
            stats[2, rows] = (logits.softmax(1) * (logits - others)).sum(1)
    return _combine(stats, shard.group)


def paired_kl(
    pack: Pack,
    kept: torch.Tensor,
    weight: torch.Tensor,
    *,
    cp_group: dist.ProcessGroup,
    shard: VocabShard,
    temperature: float,
    chunk_tokens: int,
    fp32_logits: bool,
) -> torch.Tensor:
    """[N] KL(second half of a pack's rows ‖ first half) of this rank's labels; 0 for those of the second half.

    The halves are the same rows with other prompts. kept: [N, H] hidden states of this rank's labels; those of all
    context-parallel ranks are gathered, since the two of a pair may lie on different ones.
    """
    states, rows, columns = (_gathered(values, cp_group) for values in (kept, pack.row_index, pack.column_index))
    # Labels of the first half by row and column, then those of the second half in the same order.
    plain, other = torch.argsort(torch.cat(rows) * pack.batch_shape[1] + torch.cat(columns)).chunk(2)
    together = torch.cat(states)
    answer = vocab_parallel_kl(
        together[other],
        together[plain],
        weight,
        shard=shard,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        fp32_logits=fp32_logits,
    )
    kl = torch.zeros(len(together), dtype=answer.dtype, device=answer.device)
    kl[plain] = answer
    return kl.split([len(part) for part in states])[cp_group.rank()]


def _gathered(values: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all ranks, whose first dimensions may differ."""
    if group.size() == 1:
        return [values]
    counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([len(values)], device=values.device), group=group)
    padded = values.new_zeros(max(int(count) for count in counts), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(count)] for part, count in zip(parts, counts, strict=True)]


def _combine(stats: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The KL over the whole vocabulary from every rank's statistics: the one collective."""
    parts = stats[None]
    if group.size() > 1:
        parts = stats.new_empty(group.size(), *stats.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), stats, group=group)
    lse, lse_other = parts[:, 0].logsumexp(0), parts[:, 1].logsumexp(0)
    mass = torch.exp(parts[:, 0] - lse)
    # Round-off may leave a tiny negative number where the two agree.
    return ((mass * parts[:, 2]).sum(0) - lse + lse_other).clamp(min=0)
