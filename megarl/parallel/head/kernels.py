"""Define the two computations on a chunk of logits: statistics of each token, and the gradient that overwrites the
logits.

For raw logits r = h·Wᵀ of one vocabulary shard, temperature T and label y:  z = r/T.
"""

from typing import Protocol

import torch
from torch import Tensor

# Float32 numbers of a block: a share of a core's cache on CPU; on an accelerator enough to fill it.
_BLOCK_ELEMENTS = {"cpu": 1 << 17}
_DEVICE_BLOCK_ELEMENTS = 1 << 24


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

    def write_gradient(
        self,
        logits: Tensor,
        inverse_temperature: Tensor,
        labels: Tensor,
        *,
        lse: Tensor,
        grad_logprobs: Tensor,
        a: Tensor,
        b: Tensor | None,
    ) -> None:
        """Overwrite raw logits [n, V] by the loss's gradient with respect to them.

        With log p_v = z_v − lse (lse: [n], of the whole vocabulary):
            ∂L/∂r_v = (−p_v (a + b·log p_v) + grad_logprobs·1[v = label]) / T.
        For L = Σ g_l·log p(label) + g_H·H:  a = g_l + g_H·H and b = g_H; b is None where it is 0.
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

    def write_gradient(
        self,
        logits: Tensor,
        inverse_temperature: Tensor,
        labels: Tensor,
        *,
        lse: Tensor,
        grad_logprobs: Tensor,
        a: Tensor,
        b: Tensor | None,
    ) -> None:
        log_probs, gradient = workspaces(logits, lse.dtype)
        for rows in blocks(logits, len(log_probs)):
            n = rows.stop - rows.start
            log_p = normalised(logits[rows], inverse_temperature[rows], lse[rows], out=log_probs[:n])
            policy_gradient(
                log_p,
                inverse_temperature[rows],
                labels[rows],
                grad_logprobs=grad_logprobs[rows],
                a=a[rows],
                b=None if b is None else b[rows],
                out=gradient[:n],
            )
            logits[rows] = gradient[:n]


def normalised(logits: Tensor, inverse_temperature: Tensor, lse: Tensor, *, out: Tensor) -> Tensor:
    """Write log p = z − lse of raw logits to `out`, and return it."""
    return torch.mul(logits, inverse_temperature[:, None], out=out).sub_(lse[:, None])


def policy_gradient(
    log_p: Tensor,
    inverse_temperature: Tensor,
    labels: Tensor,
    *,
    grad_logprobs: Tensor,
    a: Tensor,
    b: Tensor | None,
    out: Tensor,
) -> None:
    """Write the gradient that `ChunkKernels.write_gradient` defines to `out`; `log_p` may be overwritten."""
    torch.exp(log_p, out=out)
    # Divide the factors of each row by T, instead of its many logits.
    scale = -inverse_temperature[:, None]
    if b is None:
        out.mul_(a[:, None] * scale)
    else:
        out.mul_(log_p.mul_(b[:, None] * scale).add_(a[:, None] * scale))
    # Add this term before rounding, because for a likely label the two terms nearly cancel.
    at_label = (grad_logprobs * inverse_temperature * (labels >= 0)).to(out.dtype)
    out.scatter_add_(1, labels.clamp(min=0)[:, None], at_label[:, None])


def workspaces(logits: Tensor, dtype: torch.dtype, count: int = 2) -> tuple[Tensor, ...]:
    """Allocate `count` tensors of a few rows of logits; together they take what a block may."""
    elements = _BLOCK_ELEMENTS.get(logits.device.type, _DEVICE_BLOCK_ELEMENTS) * 2 // count
    rows = min(logits.shape[0], max(1, elements // logits.shape[1]))
    return torch.empty(count, rows, logits.shape[1], dtype=dtype, device=logits.device).unbind()


def blocks(logits: Tensor, size: int) -> list[slice]:
    """Cut the rows of logits into blocks of at most `size` rows."""
    return [slice(i, min(i + size, len(logits))) for i in range(0, len(logits), size)] if size else []
