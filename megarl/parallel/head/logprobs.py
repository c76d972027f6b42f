"""Log-probs and entropies on tensor-parallel-sharded logits; the vocabulary is never gathered.

For a row with hidden state h, temperature T and label y:  z = h·Wᵀ/T,  lse = log Σ_v e^{z_v},
    log p(y) = z_y − lse,                      H = lse − Σ_v p_v z_v   (nats),
    ∂log p(y)/∂z_v = 1[v=y] − p_v,             ∂H/∂z_v = −p_v (log p_v + H).

Each rank holds V/tp rows of W and works on a chunk of rows at a time, so that beside the regime's own memory there
are O(chunk · V/tp) logits.

Method: streaming log-sum-exp over vocabulary shards, as in Megatron's vocab-parallel cross entropy (Shoeybi et
al. 2019) and Cut Cross-Entropy (Wijmans et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.parallel.head.choose import choose_kernels
from megarl.parallel.head.differentiable import DeferredGradients, GradientsInChunk, LossGradients
from megarl.parallel.head.gradients import GradientSinks
from megarl.parallel.head.kernels import ChunkKernels
from megarl.parallel.head.regime import Regime, automatic_chunk
from megarl.parallel.head.rows import RowOwners
from megarl.parallel.head.shard import VocabShard
from megarl.parallel.head.statistics import HeadInputs, row_statistics
from megarl.parallel.head.top import TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """[N] float32 log-probs of the labels and entropies, in nats. `entropy` has no graph unless asked for."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: torch.Tensor | float = 1.0,
    regime: Regime = Regime.RECOMPUTE,
    chunk_tokens: int | None = None,
    entropy_needs_grad: bool = False,
    fp32_logits: bool = False,
    overwrite_hidden: bool = False,
    row_counts: Sequence[int] | None = None,
    main_grad: torch.Tensor | None = None,
    loss_gradients: LossGradients | None = None,
    kernels: ChunkKernels | None = None,
) -> TokenLogprobs:
    """Log-probs of `labels` and entropies from hidden states and this rank's rows of the output weight.

    Args:
        hidden: [N, H], the same on every rank of `shard.group`; with `row_counts` the [row_counts[rank], H] rows of
            this rank, in rank order. Its gradient comes back complete: reduced over the group.
        weight: [≥ shard.size, H]; rows beyond `shard.size` are vocabulary padding.
        labels: [N] int64 ids in the true vocabulary.
        temperature: a float, or [N] per-row temperatures, > 0.
        regime: what is kept for backward; of no consequence without a graph.
        chunk_tokens: rows of logits at a time; None: as `automatic_chunk` says.
        entropy_needs_grad: whether `entropy` has a graph; in the regime in_chunk `loss_gradients` decides.
        fp32_logits: multiply in float32 (a float32 copy of the weight shard lives from forward to backward).
        overwrite_hidden: write the gradient of `hidden` over it, for a tensor that nothing else reads, not even the
            backward of what made it; then backward runs once. So it does where `row_counts` had rows gathered, whose
            copy is overwritten in any case.
        main_grad: [≥ shard.size, H] float32 to which the weight's gradient is added; the weight then gets none from
            autograd. None: it does.
        loss_gradients: what the regime in_chunk needs.
        kernels: None: the best for the device.

    Raises:
        ValueError: shapes that do not agree, a weight or rows of the regime that are missing.
    """
    num_rows = len(hidden) if row_counts is None else sum(row_counts)
    if num_rows != len(labels):
        raise ValueError(f"hidden has {num_rows} rows, labels {len(labels)}; they must agree")
    rank, size = shard.group.rank(), shard.group.size()
    if row_counts is not None and (len(row_counts) != size or len(hidden) != row_counts[rank]):
        raise ValueError(f"hidden has {len(hidden)} rows on rank {rank} of {size}, expected those of {row_counts}")
    if (regime is Regime.IN_CHUNK) != (loss_gradients is not None) and torch.is_grad_enabled():
        raise ValueError(f"regime {regime}: loss_gradients belong to {Regime.IN_CHUNK}, which needs them")
    if fp32_logits:
        hidden, weight = hidden.float(), weight.float()
    owners = RowOwners(group=shard.group, counts=None if row_counts is None else tuple(row_counts))
    x = head_inputs(
        owners.gather(hidden.detach()),
        weight,
        labels,
        shard=shard,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        kernels=kernels,
    )
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        found = row_statistics(x)
        return TokenLogprobs(logprobs=found.logprobs, entropy=found.entropy)
    # What was gathered here is nobody else's.
    overwrite = overwrite_hidden or x.hidden.data_ptr() != hidden.data_ptr()
    sinks = GradientSinks(owners=owners, main_grad=main_grad, overwrite_hidden=overwrite)
    if loss_gradients is not None:
        logprobs, entropy = GradientsInChunk.apply(hidden, weight, x, sinks, loss_gradients)
    else:
        keep = regime is Regime.KEEP
        logprobs, entropy = DeferredGradients.apply(hidden, weight, x, sinks, entropy_needs_grad, keep)
    return TokenLogprobs(logprobs=logprobs, entropy=entropy)


@torch.no_grad()
def vocab_parallel_top_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    top_k: int,
    temperature: torch.Tensor | float = 1.0,
    chunk_tokens: int | None = None,
    kernels: ChunkKernels | None = None,
) -> tuple[TokenLogprobs, TopLogprobs]:
    """`vocab_parallel_logprobs`, and in the same pass each row's `top_k` likeliest tokens; no graph."""
    x = head_inputs(
        hidden, weight, labels, shard=shard, temperature=temperature, chunk_tokens=chunk_tokens, kernels=kernels
    )
    found = row_statistics(x, top_k=top_k)
    assert found.top is not None
    return TokenLogprobs(logprobs=found.logprobs, entropy=found.entropy), found.top


def head_inputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    temperature: torch.Tensor | float,
    chunk_tokens: int | None,
    kernels: ChunkKernels | None = None,
) -> HeadInputs:
    """What `vocab_parallel_logprobs` makes of its arguments, without a graph; `hidden` has all rows."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    inverse_temperature = torch.as_tensor(temperature, dtype=wide, device=hidden.device).reciprocal()
    return HeadInputs(
        hidden=hidden.detach(),
        weight=weight.detach()[: shard.size],
        labels=shard.local_labels(labels),
        inverse_temperature=inverse_temperature.expand(labels.shape).contiguous(),
        shard=shard,
        # From what all ranks know alike: they exchange chunk by chunk.
        chunk_tokens=chunk_tokens
        or automatic_chunk(len(hidden), hidden=hidden.shape[1], num_logits=len(weight), itemsize=hidden.element_size()),
        kernels=kernels or choose_kernels(hidden.device),
    )
