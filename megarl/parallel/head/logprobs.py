"""Compute log-probs and entropies on tensor-parallel-sharded logits; the vocabulary is never gathered.

For a token's hidden state h, temperature T and label y:  z = h·Wᵀ/T,  lse = log Σ_v e^{z_v},
    log p(y) = z_y − lse,                      H = lse − Σ_v p_v z_v   (nats),
    ∂log p(y)/∂z_v = 1[v=y] − p_v,             ∂H/∂z_v = −p_v (log p_v + H).
With a nucleus S, the tokens that y was sampled from:  log p(y) = z_y − log Σ_{v∈S} e^{z_v},  H as above.

Each rank holds V/tp rows of W and works on a chunk of tokens at a time. Its logits need O(chunk · V/tp) memory, besides
what the memory mode (recompute, keep, in_chunk) keeps for backward.

Method: streaming log-sum-exp over vocabulary shards, as in Megatron's vocab-parallel cross entropy (Shoeybi et al.
2019) and Cut Cross-Entropy (Wijmans et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.parallel.head.choose import choose_kernels
from megarl.parallel.head.differentiable import DeferredGradients, GradientsInChunk, LossGradients
from megarl.parallel.head.gradients import GradientSinks
from megarl.parallel.head.kernels import ChunkKernels
from megarl.parallel.head.memory_mode import HeadMemoryMode, automatic_chunk
from megarl.parallel.head.rows import RowOwners
from megarl.parallel.head.statistics import NOT_OWNED, HeadInputs, TopLogprobs, VocabShard, row_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log-prob of each label and the entropy at its position, both [N] float32 in nats.

    `entropy` has gradients only if they were requested.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """How the log-prob head computes, what it keeps for backward, and where it writes gradients.

    Attributes:
        temperature: a float, or one per token [N], > 0.
        memory_mode: what is kept for backward (see `HeadMemoryMode`); irrelevant without gradients.
        chunk_tokens: tokens whose logits are computed at a time; None: `automatic_chunk` decides.
        kernels: computations on a chunk of logits; None: the best for the device.
        fp32_logits: multiply in float32 (a float32 copy of the weight shard lives from forward to backward).
        entropy_needs_grad: whether the entropy is differentiable; under in_chunk, `loss_gradients` decides instead.
        loss_gradients: the loss's gradients as a function of log-probs and entropies; required under in_chunk.
        main_grad: [≥ shard.size, H] float32; the weight's gradient is added to it instead of returned to autograd.
        overwrite_hidden: write the gradient of the hidden states over them, to save memory. No other code may read
            them then, not even in backward. With this or `row_counts`, backward can run only once.
        row_counts: how many hidden states each rank has, as in `RowOwners`; None: every rank has all of them.
        logit_cap: c if the model's logits are c·tanh(h·Wᵀ/c).
    """

    temperature: torch.Tensor | float = 1.0
    memory_mode: HeadMemoryMode = HeadMemoryMode.RECOMPUTE
    chunk_tokens: int | None = None
    kernels: ChunkKernels | None = None
    fp32_logits: bool = False
    entropy_needs_grad: bool = False
    loss_gradients: LossGradients | None = None
    main_grad: torch.Tensor | None = None
    overwrite_hidden: bool = False
    row_counts: Sequence[int] | None = None
    logit_cap: float | None = None


_DEFAULTS = HeadOptions()


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    options: HeadOptions = _DEFAULTS,
    nucleus: torch.Tensor | None = None,
) -> TokenLogprobs:
    """Compute log-probs of `labels` and entropies from hidden states and this rank's rows of the output weight.

    Args:
        hidden: [N, H] on every rank of `shard.group`; or, with `row_counts`, this rank's part [row_counts[rank], H].
            Its gradient is summed over the group.
        weight: [≥ shard.size, H]; rows beyond `shard.size` are vocabulary padding.
        labels: [N] int64 token ids.
        nucleus: normalise log-probs over the tokens that each label was sampled from (see `HeadInputs`).

    Raises:
        ValueError: shapes do not agree, or an option that the memory mode requires is missing.
    """
    x, sinks, hidden, weight = prepare_head(hidden, weight, labels, shard=shard, options=options, nucleus=nucleus)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        found = row_statistics(x)
        return TokenLogprobs(logprobs=found.logprobs, entropy=found.entropy)
    if options.loss_gradients is not None:
        logprobs, entropy = GradientsInChunk.apply(hidden, weight, x, sinks, options.loss_gradients)
    else:
        needs_grad, keep = options.entropy_needs_grad, options.memory_mode is HeadMemoryMode.KEEP
        logprobs, entropy = DeferredGradients.apply(hidden, weight, x, sinks, needs_grad, keep)
    return TokenLogprobs(logprobs=logprobs, entropy=entropy)


def prepare_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    options: HeadOptions,
    nucleus: torch.Tensor | None,
) -> tuple[HeadInputs, GradientSinks, torch.Tensor, torch.Tensor]:
    """Check the arguments of `vocab_parallel_logprobs`, and gather hidden states that ranks hold in parts.

    Return the head's inputs, where gradients go, and the two tensors that autograd differentiates by.
    """
    owners = _row_owners(len(hidden), len(labels), shard.group, options.row_counts)
    if (options.memory_mode is HeadMemoryMode.IN_CHUNK) != (
        options.loss_gradients is not None
    ) and torch.is_grad_enabled():
        raise ValueError(
            f"memory_mode {options.memory_mode}: loss_gradients belong to {HeadMemoryMode.IN_CHUNK}, which needs them"
        )
    hidden, weight = (hidden.float(), weight.float()) if options.fp32_logits else (hidden, weight)
    states = owners.gather(hidden.detach())
    x = head_inputs(states, weight, labels, shard=shard, options=options, nucleus=nucleus)
    # Hidden states that were gathered here belong to nobody else, so they may be overwritten.
    overwrite = options.overwrite_hidden or states.data_ptr() != hidden.data_ptr()
    return x, GradientSinks(owners=owners, main_grad=options.main_grad, overwrite_hidden=overwrite), hidden, weight


def _row_owners(num_own: int, num_labels: int, group: dist.ProcessGroup, row_counts: Sequence[int] | None) -> RowOwners:
    """Return which rank owns which hidden states, after checking that their numbers agree with the labels."""
    num_rows = num_own if row_counts is None else sum(row_counts)
    if num_rows != num_labels:
        raise ValueError(f"hidden has {num_rows} rows, labels {num_labels}; they must agree")
    rank, size = group.rank(), group.size()
    if row_counts is not None and (len(row_counts) % size or num_own != sum(row_counts[rank::size])):
        raise ValueError(f"hidden has {num_own} rows on rank {rank} of {size}, expected those of {row_counts}")
    return RowOwners(group=group, counts=None if row_counts is None else tuple(row_counts))


@torch.no_grad()
def vocab_parallel_top_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    top_k: int,
    options: HeadOptions = _DEFAULTS,
) -> tuple[TokenLogprobs, TopLogprobs]:
    """Compute log-probs, entropies and the `top_k` most likely tokens per position, without autograd."""
    found = row_statistics(head_inputs(hidden, weight, labels, shard=shard, options=options), top_k=top_k)
    assert found.top is not None
    return TokenLogprobs(logprobs=found.logprobs, entropy=found.entropy), found.top


def head_inputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shard: VocabShard,
    options: HeadOptions,
    nucleus: torch.Tensor | None = None,
) -> HeadInputs:
    """Detach the arguments of `vocab_parallel_logprobs` for use without gradients. `hidden` is the complete [N, H]."""
    hidden, weight = (hidden.float(), weight.float()) if options.fp32_logits else (hidden, weight)
    local = labels - shard.start
    wide = torch.promote_types(hidden.dtype, torch.float32)
    inverse_temperature = torch.as_tensor(options.temperature, dtype=wide, device=hidden.device).reciprocal()
    return HeadInputs(
        hidden=hidden.detach(),
        weight=weight.detach()[: shard.size],
        labels=local.where((local >= 0) & (local < shard.size), NOT_OWNED),
        inverse_temperature=inverse_temperature.expand(labels.shape).contiguous(),
        shard=shard,
        # Computed from values that are equal on all ranks, because ranks exchange data chunk by chunk.
        chunk_tokens=options.chunk_tokens
        or automatic_chunk(len(hidden), hidden=hidden.shape[1], num_logits=len(weight), itemsize=hidden.element_size()),
        kernels=options.kernels or choose_kernels(hidden.device),
        nucleus=nucleus,
        logit_cap=options.logit_cap,
    )
