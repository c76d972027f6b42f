"""Compute the gradients of hidden states and output weight from the gradients of chunks of logits."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.parallel.head.rows import RowOwners, wait_all

# How many chunks may be in reduction at once. The next chunk is computed meanwhile; each further one would hold another
# buffer of the backend.
MAX_REDUCTIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSinks:
    """Where the log-prob head writes its gradients.

    owners: which rank owns which hidden states. overwrite_hidden: whether the gradient of the hidden states may be
    written over them. main_grad: the tensor to which the weight's gradient is added; None: a new tensor is returned.
    """

    owners: RowOwners
    main_grad: torch.Tensor | None
    overwrite_hidden: bool


class HiddenGradient:
    """The gradient ∂L/∂h [N, H] of hidden states, summed over the ranks' vocabulary shards.

    Tokens come in chunks: while the gradient of one chunk is summed over ranks, that of the next is computed.
    """

    def __init__(self, hidden: torch.Tensor, sinks: GradientSinks) -> None:
        self._partial = hidden if sinks.overwrite_hidden else torch.empty_like(hidden)
        self._owners = sinks.owners
        self._works: deque[Sequence[dist.Work | None]] = deque()

    def add(self, rows: slice, grad_logits: torch.Tensor, weight: torch.Tensor) -> None:
        """Compute ∂L/∂h of a chunk as (gradient of its logits)·weight, and start to sum it over ranks.

        With `overwrite_hidden` it is stored in the memory of the chunk's hidden states.
        """
        part = self._partial[rows]
        if len(weight):
            torch.mm(grad_logits, weight, out=part)
        else:
            part.zero_()
        self._works.append(self._owners.start_reduction(part, rows.start))
        if len(self._works) > MAX_REDUCTIONS:
            wait_all(self._works.popleft())

    def finish(self) -> torch.Tensor:
        """Wait for all reductions, and return the gradient of the hidden states that this rank owns."""
        for works in self._works:
            wait_all(works)
        # Detach, so that autograd holds the only reference; otherwise it would copy the tensor.
        return self._owners.own(self._partial).detach()


class WeightGradient:
    """The gradient ∂L/∂W of a vocabulary shard, summed over chunks in float32.

    If Megatron keeps a main gradient for the weight, the sum is added there. A frozen weight gets none. The sum is in
    float32 because in bfloat16 it would depend on the chunk size.
    """

    def __init__(self, weight: torch.Tensor, main: torch.Tensor | None, *, wanted: bool) -> None:
        self._dtype, self._main = weight.dtype, main
        self._sum = main if wanted else None
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if wanted and (main is None or main.dtype != dtype):
            self._sum = torch.zeros_like(weight if main is None else main, dtype=dtype)

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add a chunk's part of the gradient: its logits' gradient, transposed, times its hidden states."""
        if self._sum is None or not grad_logits.shape[1]:
            return
        target = self._sum[: grad_logits.shape[1]]
        if grad_logits.dtype == target.dtype:
            target.addmm_(grad_logits.t(), hidden)
        elif grad_logits.is_cuda:
            # A GEMM of 16-bit inputs accumulates in float32 anyway; `out_dtype` keeps that result unrounded.
            torch.addmm(target, grad_logits.t(), hidden, out_dtype=target.dtype, out=target)
        else:
            target.addmm_(grad_logits.t().to(target.dtype), hidden.to(target.dtype))

    def finish(self) -> torch.Tensor | None:
        """Return the weight's gradient, or None if the weight is frozen or the sum went into Megatron's main
        gradient.
        """
        if self._sum is None or self._sum is self._main:
            return None
        if self._main is None:
            return self._sum.to(self._dtype)
        self._main.add_(self._sum)
        return None
