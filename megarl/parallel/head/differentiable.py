"""Define the log-prob head's autograd functions for three memory modes, which trade memory for recomputation.

recompute   keeps only statistics; backward computes the logits again, chunk by chunk        8·N·H·V FLOP
keep        keeps the raw logits [N, V/tp]; backward overwrites them with their gradient      6·N·H·V FLOP
in_chunk    computes gradients in forward, while a chunk's logits exist, and keeps those      6·N·H·V FLOP

FLOPs are totals over all ranks. recompute and keep exchange statistics once, in_chunk once per chunk. in_chunk needs a
loss that is a sum over tokens, where each term depends only on that token's log-prob and entropy.
"""

from collections.abc import Callable
from itertools import repeat
from typing import Any, TypeAlias

import torch

from megarl.parallel.head.gradients import GradientSinks, HiddenGradient, WeightGradient
from megarl.parallel.head.kernels import PolicyTerm
from megarl.parallel.head.statistics import (
    HeadInputs,
    RowStatistics,
    combine,
    gather_parts,
    row_statistics,
    write_chunk_statistics,
)

# ([N] log-probs, [N] entropies, and with a teacher [N] divergences) → the loss's gradient with respect to each. That of
# entropies is None if the loss does not depend on them.
LossGradients: TypeAlias = Callable[..., tuple[torch.Tensor | None, ...]]
# The type of `ChunkKernels.write_gradient`.
GradientWriter: TypeAlias = Callable[[torch.Tensor, PolicyTerm], None]

# Two float32 computations of the same gradient differ by less than this, relative to its largest element.
SAME_GRADIENT = 1e-4


def overwrite_by_gradient(
    x: HeadInputs,
    rows: slice,
    logits: torch.Tensor,
    statistics: RowStatistics,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    write: GradientWriter | None = None,
) -> None:
    """Overwrite raw logits of `rows` by the loss's gradient with respect to h·Wᵀ.

    Logits, statistics and gradients are for these rows only. write: writes it for a whole vocabulary; None: the kernels
    do.
    """
    if not x.shard.size:
        return
    # The derivative of capped logits by those before, which the gradient by the former is about to overwrite.
    slope = (
        None if x.logit_cap is None else torch.addcmul(logits.new_ones(()), logits, logits, value=-(x.logit_cap**-2))
    )
    if x.nucleus is not None:
        # log p of a nucleus has a gradient at its few tokens only, which is scattered there below. It has the factor
        # 1[v = label] − q_v with q = softmax over the nucleus, rounded once, because for a likely label they cancel.
        columns, z = x.of_nucleus(rows, logits)
        at_tokens = (columns == x.labels[rows, None]).to(z.dtype) - (z - statistics.nucleus_lse[:, None]).exp()
        truncated = x.nucleus[rows, 0] >= 0
        scale = (grad_logprobs * x.inverse_temperature[rows]).where(truncated, 0.0)
        at_tokens = (at_tokens * scale[:, None]).masked_fill(z == -torch.inf, 0.0)
        grad_logprobs = grad_logprobs.masked_fill(truncated, 0.0)
    (write or x.kernels.write_gradient)(
        logits,
        PolicyTerm(
            inverse_temperature=x.inverse_temperature[rows],
            labels=x.labels[rows],
            lse=statistics.lse,
            grad_logprobs=grad_logprobs,
            a=grad_logprobs if grad_entropy is None else grad_logprobs + grad_entropy * statistics.entropy,
            b=grad_entropy,
        ),
    )
    if x.nucleus is not None:
        logits.scatter_add_(1, columns, at_tokens.to(logits.dtype))
    if slope is not None:
        logits.mul_(slope)


class DeferredGradients(torch.autograd.Function):
    """The autograd function (own hidden states, weight) → (log p, H) of the memory modes recompute and keep."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        weight: torch.Tensor,
        x: HeadInputs,
        sinks: GradientSinks,
        entropy_needs_grad: bool,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x.buffer(len(x.hidden)) if keep else None
        found = row_statistics(x, kept=kept)
        # Autograd frees what it saves after backward, and watches whether it is overwritten.
        ctx.save_for_backward(found.lse, found.entropy, found.nucleus_lse, weight, *x.large)
        ctx.context = x.holding(repeat(weight.new_empty(0))), sinks
        ctx.kept, ctx.spent = kept, False
        if not entropy_needs_grad:
            ctx.mark_non_differentiable(found.entropy)
        ctx.set_materialize_grads(False)
        return found.logprobs, found.entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[object, ...]:
        x, sinks = ctx.context
        if ctx.spent:
            raise RuntimeError("log-prob head: a second backward, but the first one overwrote the hidden states")
        ctx.spent = sinks.overwrite_hidden
        lse, entropy, nucleus_lse, weight, *large = ctx.saved_tensors
        x = x.holding(iter(large))
        hidden = x.hidden
        # The gradient overwrites the kept logits, so a second backward has to recompute them.
        kept, ctx.kept = ctx.kept, None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        buffer = x.buffer(min(x.chunk_tokens, len(hidden))) if kept is None else None
        grad_hidden = HiddenGradient(hidden, sinks)
        grad_weight = WeightGradient(weight, sinks.main_grad, wanted=ctx.needs_input_grad[1])
        for rows in x.chunks():
            logits = kept[rows] if buffer is None else x.write_logits(rows, buffer)
            # The gradient does not read the log-probs.
            there = RowStatistics(
                logprobs=lse[rows], entropy=entropy[rows], lse=lse[rows], nucleus_lse=nucleus_lse[rows]
            )
            grad_h = None if grad_entropy is None else grad_entropy[rows]
            overwrite_by_gradient(x, rows, logits, there, grad_logprobs[rows], grad_h)
            if kept is None:
                grad_weight.add(logits, hidden[rows])
                grad_hidden.add(rows, logits, x.weight)
        if kept is not None:
            # Use a single product, which reads and writes the accumulated gradient only once.
            grad_weight.add(kept, hidden)
            for rows in x.chunks():
                grad_hidden.add(rows, kept[rows], x.weight)
        return grad_hidden.finish(), grad_weight.finish(), None, None, None, None


class GradientsInChunk(torch.autograd.Function):
    """The autograd function (own hidden states, weight) → (log p, H) that computes gradients already in forward.

    Backward returns these gradients, after checking that the loss's actual gradients are those assumed in forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        weight: torch.Tensor,
        x: HeadInputs,
        sinks: GradientSinks,
        loss_gradients: LossGradients,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy, grad_logprobs, grad_entropy = torch.zeros(
            4, len(x.hidden), dtype=x.statistics_dtype, device=x.hidden.device
        )
        depends_on_entropy = False
        buffer = x.buffer(min(x.chunk_tokens, len(x.hidden)))
        grad_hidden = HiddenGradient(x.hidden, sinks)
        grad_weight = WeightGradient(weight, sinks.main_grad, wanted=ctx.needs_input_grad[1])
        for rows in x.chunks():
            logits = x.write_logits(rows, buffer)
            parts = torch.empty(x.num_statistics, len(logits), dtype=x.statistics_dtype, device=logits.device)
            write_chunk_statistics(x, rows, logits, parts)
            found = combine(gather_parts(parts, x.shard.group), None if x.nucleus is None else x.nucleus[rows])
            logprobs[rows], entropy[rows] = found.logprobs, found.entropy
            grad_l, grad_h = loss_gradients(logprobs, entropy)
            assert grad_l is not None
            grad_logprobs[rows] = grad_l[rows]
            if grad_h is not None:
                depends_on_entropy, grad_entropy[rows] = True, grad_h[rows]
                grad_h = grad_entropy[rows]
            overwrite_by_gradient(x, rows, logits, found, grad_logprobs[rows], grad_h)
            grad_weight.add(logits, x.hidden[rows])
            grad_hidden.add(rows, logits, x.weight)
        ctx.gradients = grad_hidden.finish(), grad_weight.finish()
        ctx.save_for_backward(grad_logprobs, grad_entropy)
        if not depends_on_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[object, ...]:
        used_logprobs, used_entropy = ctx.saved_tensors
        require_same_gradient("log-probs", used_logprobs, grad_logprobs)
        require_same_gradient("entropy", used_entropy, grad_entropy)
        if ctx.gradients is None:
            raise RuntimeError("log-prob head, memory_mode in_chunk: a second backward, but gradients are made once")
        # Drop our references, or autograd would copy the gradients.
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        return grad_hidden, grad_weight, None, None, None


def require_same_gradient(
    name: str, used: torch.Tensor, actual: torch.Tensor | None, order: torch.Tensor | None = None
) -> None:
    """Raise ValueError if backward receives other loss gradients (`actual`) than forward has assumed (`used`).

    order: the rows of the caller, if these are in another order.
    """
    difference = (used if actual is None else used - actual).abs()
    if len(used) and not difference.max() <= SAME_GRADIENT * used.abs().max():
        row = int(difference.argmax())
        raise ValueError(
            f"log-prob head, memory_mode in_chunk: the loss's gradient with respect to the {name} of kept row "
            f"{row if order is None else int(order[row])} is "
            f"{0.0 if actual is None else float(actual[row])}, but was {float(used[row])} when that row's chunk was "
            f"computed; the loss is not a sum over tokens: use the memory mode recompute or keep"
        )
