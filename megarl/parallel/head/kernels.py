"""Define the two computations on a chunk of logits: statistics of each token, and the gradient that overwrites the
logits.

For raw logits r = h·Wᵀ of one vocabulary shard, temperature T and label y:  z = r/T.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

# Float32 numbers of a block: a share of a core's cache on CPU; on an accelerator enough to fill it.
_BLOCK_ELEMENTS = {"cpu": 1 << 17}
_DEVICE_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerm:
    """The part of a loss L = Σ g_l·log p(label) + g_H·H in the gradient by a chunk of logits, each [n].

    lse: over the whole vocabulary. labels: as in `ChunkKernels`. grad_logprobs: g_l. a: g_l + g_H·H. b: g_H, or None
    where it is 0.
    """

    inverse_temperature: Tensor
    labels: Tensor
    lse: Tensor
    grad_logprobs: Tensor
    a: Tensor
    b: Tensor | None

    def rows(self, rows: slice) -> "PolicyTerm":
        """Return the term of some of the chunk's tokens."""
        return PolicyTerm(
            inverse_temperature=self.inverse_temperature[rows],
            labels=self.labels[rows],
            lse=self.lse[rows],
            grad_logprobs=self.grad_logprobs[rows],
            a=self.a[rows],
            b=None if self.b is None else self.b[rows],
        )

    def by_label(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return all but the temperatures, in the order of fields."""
        return self.labels, self.lse, self.grad_logprobs, self.a, self.b

    def columns(self, first: int, width: int) -> "PolicyTerm":
        """Return the term for `width` columns from `first` on, within which labels then count."""
        here = self.labels - first
        return replace(self, labels=here.masked_fill((here < 0) | (here >= width), -1))


class ChunkKernels(Protocol):
    """The interface of the two computations on a chunk of logits [n, V], with n tokens and a vocabulary shard of V.

    Labels are indices into the shard; −1 stands for a label in another rank's shard.
    """

    def statistics(self, logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
        """Write three numbers per token to `out` [3, n]: lse, entropy H of the shard's softmax, and the label's z.

        z = logits·inverse_temperature, p = softmax(z), lse = log Σ_v e^{z_v} and H = lse − Σ_v p_v z_v, in nats, all
        over this shard alone. A label in another shard is given as −1; its z is 0. logits: [n, V] raw, left unchanged,
        V ≥ 1. inverse_temperature: [n]. labels: [n] int64.
        """

    def write_gradient(self, logits: Tensor, term: PolicyTerm) -> None:
        """Overwrite raw logits [n, V] by the loss's gradient with respect to them.

        With log p_v = z_v − lse:  ∂L/∂r_v = (−p_v (a + b·log p_v) + grad_logprobs·1[v = label]) / T.
        """


class TorchKernels:
    """The kernels of `ChunkKernels` in PyTorch, for every device and dtype.

    Statistics are float32, or float64 if the logits are float64.

    Tokens are processed in blocks, with two reused workspaces of one block each. So a block stays in the cache during
    the several operations on it, and float32 copies of bfloat16 logits stay small.
    """

    def statistics(self, logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
        owned = labels >= 0
        picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0].to(out.dtype) * inverse_temperature
        torch.where(owned, picked, torch.zeros_like(picked), out=out[2])
        shifted, mass = workspaces(logits, out.dtype)
        for rows in blocks(logits, len(shifted)):
            n = rows.stop - rows.start
            z, e = shifted[:n], mass[:n]
            torch.mul(logits[rows], inverse_temperature[rows, None], out=z)
            peak = z.amax(1, keepdim=True)
            # Compute the entropy from shifted logits, so that no large numbers cancel.
            torch.exp(z.sub_(peak), out=e)
            total = e.sum(1)
            mean = e.mul_(z).sum(1) / total
            torch.log(total, out=total)
            torch.add(peak[:, 0], total, out=out[0, rows])
            torch.sub(total, mean, out=out[1, rows])

    def write_gradient(self, logits: Tensor, term: PolicyTerm) -> None:
        log_probs, gradient = workspaces(logits, term.lse.dtype)
        for rows in blocks(logits, len(log_probs)):
            n, here = rows.stop - rows.start, term.rows(rows)
            log_p = normalised(logits[rows], here.inverse_temperature, here.lse, out=log_probs[:n])
            policy_gradient(log_p, here, out=gradient[:n])
            logits[rows] = gradient[:n]


def normalised(logits: Tensor, inverse_temperature: Tensor, lse: Tensor, *, out: Tensor) -> Tensor:
    """Write log p = z − lse of raw logits to `out`, and return it."""
    return torch.mul(logits, inverse_temperature[:, None], out=out).sub_(lse[:, None])


def policy_gradient(log_p: Tensor, term: PolicyTerm, *, out: Tensor) -> None:
    """Write the gradient that `ChunkKernels.write_gradient` defines to `out`; `log_p` may be overwritten."""
    torch.exp(log_p, out=out)
    # Divide the factors of each row by T, instead of its many logits.
    scale = -term.inverse_temperature[:, None]
    if term.b is None:
        out.mul_(term.a[:, None] * scale)
    else:
        out.mul_(log_p.mul_(term.b[:, None] * scale).add_(term.a[:, None] * scale))
    # Add this term before rounding, because for a likely label the two terms nearly cancel.
    at_label = (term.grad_logprobs * term.inverse_temperature * (term.labels >= 0)).to(out.dtype)
    out.scatter_add_(1, term.labels.clamp(min=0)[:, None], at_label[:, None])


def workspaces(logits: Tensor, dtype: torch.dtype, count: int = 2) -> tuple[Tensor, ...]:
    """Allocate `count` tensors of a few rows of logits; together they take what a block may."""
    elements = _BLOCK_ELEMENTS.get(logits.device.type, _DEVICE_BLOCK_ELEMENTS) * 2 // count
    rows = min(logits.shape[0], max(1, elements // logits.shape[1]))
    return torch.empty(count, rows, logits.shape[1], dtype=dtype, device=logits.device).unbind()


def blocks(logits: Tensor, size: int) -> list[slice]:
    """Cut the rows of logits into blocks of at most `size` rows."""
    return [slice(i, min(i + size, len(logits))) for i in range(0, len(logits), size)] if size else []
