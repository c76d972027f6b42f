"""Log-probs and entropies on tensor-parallel-sharded logits; the vocabulary is never gathered.

For a row with hidden state h, temperature T and label y:  z = h·Wᵀ/T,  lse = log Σ_v e^{z_v},
    log p(y) = z_y − lse,      H = lse − Σ_v p_v z_v   (nats).

Each rank holds V/tp rows of W. Per chunk of rows it computes z and three float32 statistics of its shard: the
local lse, the entropy H_i of the local softmax, and z_y if it owns y. One all-gather of [3, N] then gives log p
and H exactly: lse = logsumexp_i lse_i, and with the shards' masses m_i = e^{lse_i − lse},
H = Σ_i m_i H_i − Σ_i m_i log m_i, in which no large logits cancel. Logits are recomputed chunk by chunk in
backward, so the extra memory is O(chunk · V/tp), not O(N · V/tp):
    ∂log p(y)/∂z_v = 1[v=y] − p_v,      ∂H/∂z_v = −p_v (log p_v + H).

Method: streaming log-sum-exp over vocabulary shards, as in Megatron's vocab-parallel cross entropy (Shoeybi et
al. 2019) and Cut Cross-Entropy (Wijmans et al. 2024).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Rows [start, start + size) of the true vocabulary on this rank; padded rows are excluded by `size`."""

    group: dist.ProcessGroup
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """[N] float32 log-probs of the labels and entropies, in nats. `entropy` has no graph unless asked for."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


def vocab_shard(group: dist.ProcessGroup, padded_rows_per_rank: int, vocab_size: int) -> VocabShard:
    """The shard of this rank when the padded vocabulary is split evenly over `group`."""
    start = group.rank() * padded_rows_per_rank
    return VocabShard(group=group, start=start, size=max(0, min(padded_rows_per_rank, vocab_size - start)))


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: torch.Tensor | float = 1.0,
    chunk_tokens: int = 1024,
    entropy_needs_grad: bool = False,
    fp32_logits: bool = False,
) -> TokenLogprobs:
    """Log-probs of `labels` and entropies from hidden states and this rank's rows of the output weight.

    Args:
        hidden: [N, H], the same on every rank of `shard.group`; its gradient comes back as this rank's partial
            sum, so the caller must reduce it over the group.
        weight: [≥ shard.size, H]; rows beyond `shard.size` are vocabulary padding.
        labels: [N] int64 ids in the true vocabulary.
        temperature: a float, or [N] per-row temperatures, > 0.
        chunk_tokens: rows of logits held at a time.
        fp32_logits: multiply in float32 (a float32 copy of the weight shard lives during each pass).
    """
    if hidden.shape[0] != labels.shape[0]:
        raise ValueError(f"hidden has {hidden.shape[0]} rows, labels {labels.shape[0]}; they must agree")
    inverse_temperature = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).reciprocal()
    if fp32_logits:
        hidden, weight = hidden.float(), weight.float()
    logprobs, entropy = _LinearLogprobs.apply(
        hidden,
        weight,
        labels,
        inverse_temperature.expand(labels.shape),
        shard,
        chunk_tokens,
        entropy_needs_grad,
    )
    return TokenLogprobs(logprobs=logprobs, entropy=entropy)


def chunk_logits(
    hidden: torch.Tensor, weight: torch.Tensor, inverse_temperature: torch.Tensor, rows: slice
) -> torch.Tensor:
    """Float32 (or wider) logits of some rows, [n, shard.size]."""
    logits = hidden[rows] @ weight.t()
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) * inverse_temperature[rows, None]


def _local_labels(labels: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels as local rows (0 where not owned) and whether this rank owns them."""
    local = labels - shard.start
    owned = (local >= 0) & (local < shard.size)
    return local.where(owned, 0), owned


def _shard_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    inverse_temperature: torch.Tensor,
    shard: VocabShard,
    chunk_tokens: int,
) -> torch.Tensor:
    """[3, N]: local lse, entropy of the local softmax, z of the label if owned (else 0)."""
    num_rows = hidden.shape[0]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    stats = torch.zeros(3, num_rows, dtype=wide, device=hidden.device)
    if shard.size == 0:
        stats[0] = -torch.inf
        return stats
    local, owned = _local_labels(labels, shard)
    for start in range(0, num_rows, chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        logits = chunk_logits(hidden, weight, inverse_temperature, rows)
        stats[2, rows] = logits.gather(1, local[rows, None])[:, 0] * owned[rows]
        peak = logits.amax(1, keepdim=True)
        mass = logits.sub_(peak).exp()
        total = mass.sum(1)
        stats[0, rows] = peak[:, 0] + total.log()
        stats[1, rows] = total.log() - mass.mul_(logits).sum(1) / total
    return stats


def _combine(stats: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log p, H, lse) of the whole vocabulary from every rank's statistics: the one collective."""
    if group.size() == 1:
        parts = stats[None]
    else:
        parts = stats.new_empty(group.size(), *stats.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), stats, group=group)
    lse = parts[:, 0].logsumexp(0)
    mass = torch.exp(parts[:, 0] - lse)
    entropy = (mass * parts[:, 1] + torch.special.entr(mass)).sum(0)
    return parts[:, 2].sum(0) - lse, entropy, lse


class _LinearLogprobs(torch.autograd.Function):
    """Hidden states and weight shard → (log p, H), with logits recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        inverse_temperature: torch.Tensor,
        shard: VocabShard,
        chunk_tokens: int,
        entropy_needs_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stats = _shard_statistics(hidden, weight[: shard.size], labels, inverse_temperature, shard, chunk_tokens)
        logprobs, entropy, lse = _combine(stats, shard.group)
        ctx.save_for_backward(hidden, weight, labels, inverse_temperature, lse, entropy)
        ctx.shard, ctx.chunk_tokens = shard, chunk_tokens
        if not entropy_needs_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Any, grad_entropy: Any) -> tuple[Any, ...]:
        hidden, weight, labels, inverse_temperature, lse, entropy = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        rows_of_shard = weight[: shard.size]
        local, owned = _local_labels(labels, shard)
        g_logp = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        # dz = −p·(a + b·log p) + g_logp·1[label], a = g_logp + g_H·H, b = g_H
        a = g_logp if grad_entropy is None else g_logp + grad_entropy * entropy
        grad_hidden = torch.zeros_like(hidden)
        # Float32 over chunks: sums in bfloat16 would depend on the chunk size.
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for start in range(0, hidden.shape[0] if shard.size else 0, ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            log_p = chunk_logits(hidden, rows_of_shard, inverse_temperature, rows) - lse[rows, None]
            factor = a[rows, None] if grad_entropy is None else a[rows, None] + grad_entropy[rows, None] * log_p
            grad_logits = log_p.exp_().mul_(factor).neg_()
            grad_logits.scatter_add_(1, local[rows, None], (g_logp[rows] * owned[rows])[:, None])
            grad_logits = grad_logits.mul_(inverse_temperature[rows, None]).to(hidden.dtype)
            torch.mm(grad_logits, rows_of_shard, out=grad_hidden[rows])
            grad_weight[: shard.size] += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
