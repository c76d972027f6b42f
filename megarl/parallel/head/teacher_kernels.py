"""Define the three computations on a chunk of student logits beside the teacher's: statistics, the mixture's KLs, and
the gradient that overwrites the student's logits.

For raw logits r of the student and s of the teacher, temperatures T and T':  z = r/T, u = s/T', p = softmax z and q =
softmax u over the columns given. The formulas are those of `divergence`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.kernels import PolicyTerm, blocks, normalised, policy_gradient, workspaces

# Statistics of a chunk: three of the student alone, and seven of both.
NUM_OWN, NUM_BOTH = 3, 7


class LogitPair(NamedTuple):
    """Raw logits [n, V] of a student and its teacher, and the inverse temperature [n] of each."""

    logits: Tensor
    others: Tensor
    inverse_temperature: Tensor
    teacher_inverse_temperature: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceTerm:
    """The divergence's part of a loss's gradient, for a chunk [n, V] of logits.

    others: [n, V], the teacher's raw logits. inverse_temperature: [n], the teacher's. lse, teacher_lse: [n], over all
    tokens that are compared. mean: [n], KL(p‖q) for reverse and KL(p‖m) for JSD; forward does not read it. weight: [n],
    the loss's gradient with respect to the divergence.
    """

    divergence: Divergence
    beta: float
    others: Tensor
    inverse_temperature: Tensor
    lse: Tensor
    teacher_lse: Tensor
    mean: Tensor
    weight: Tensor


class TeacherKernels(Protocol):
    """The interface of the computations on chunks of logits [n, V] of a student and its teacher."""

    def statistics(self, pair: LogitPair, labels: Tensor, out: Tensor) -> None:
        """Write ten numbers per token to `out` [10, n], all over these columns alone.

        0 to 2 are those of `ChunkKernels.statistics` for the student; 3 and 4 the teacher's lse and entropy; 5 KL(p‖q)
        and 6 KL(q‖p); 7 and 8 the largest z and u; 9 the largest u where z is largest. Logits stay unchanged.
        """

    def mixture(self, pair: LogitPair, *, lse: Tensor, teacher_lse: Tensor, beta: float, out: Tensor) -> None:
        """Write these columns' parts of KL(p‖m) and KL(q‖m) to `out` [2, n], given each lse over all columns."""

    def write_gradient(self, logits: Tensor, term: PolicyTerm, beside: DivergenceTerm) -> None:
        """Overwrite the student's raw logits by what `ChunkKernels.write_gradient` defines, plus weight·∂D/∂z_v / T."""


def log_ratio_to_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return log p − log m for the mixture m = (1−β)p + βq; it is exactly 0 where p = q."""
    gap = log_q - log_p
    share = torch.where(gap > 0, gap.new_full((), 1 - beta), gap.new_full((), beta))
    return -(share.mul_(torch.expm1(-gap.abs())).log1p_().add_(gap.clamp_(min=0)))


def _of_reverse(log_p: Tensor, log_q: Tensor, mean: Tensor, beta: float) -> Tensor:
    return log_q.neg_().add_(log_p).sub_(mean[:, None]).mul_(log_p.exp())


def _of_forward(log_p: Tensor, log_q: Tensor, mean: Tensor, beta: float) -> Tensor:
    return log_p.exp().sub_(log_q.exp_())


def _of_jsd(log_p: Tensor, log_q: Tensor, mean: Tensor, beta: float) -> Tensor:
    return log_ratio_to_mixture(log_p, log_q, beta).sub_(mean[:, None]).mul_(log_p.exp()).mul_(1 - beta)


# ([n, V] log p, [n, V] log q, [n] mean, β) → [n, V] gradient of the divergence by the student's z; log q may be
# overwritten.
SLOPES: Mapping[Divergence, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = MappingProxyType(
    {Divergence.REVERSE: _of_reverse, Divergence.FORWARD: _of_forward, Divergence.JSD: _of_jsd}
)


class TorchTeacherKernels:
    """The kernels of `TeacherKernels` in PyTorch, for every device and dtype, block by block as `TorchKernels` are."""

    def statistics(self, pair: LogitPair, labels: Tensor, out: Tensor) -> None:
        logits, others, inverse_temperature, teacher_inverse_temperature = pair
        picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0].to(out.dtype) * inverse_temperature
        out[2] = picked.masked_fill(labels < 0, 0.0)
        z_block, u_block, e_block, f_block = workspaces(logits, out.dtype, count=4)
        for rows in blocks(logits, len(z_block)):
            n = rows.stop - rows.start
            z, u, e, f = z_block[:n], u_block[:n], e_block[:n], f_block[:n]
            torch.mul(logits[rows], inverse_temperature[rows, None], out=z)
            torch.mul(others[rows], teacher_inverse_temperature[rows, None], out=u)
            peak, teacher_peak = z.amax(1, keepdim=True), u.amax(1, keepdim=True)
            out[7, rows], out[8, rows] = peak[:, 0], teacher_peak[:, 0]
            out[9, rows] = f.copy_(u).masked_fill_(z < peak, -torch.inf).amax(1)
            # As for the entropy, differences of shifted logits are small numbers.
            torch.exp(z.sub_(peak), out=e)
            torch.exp(u.sub_(teacher_peak), out=f)
            total, teacher_total = e.sum(1), f.sum(1)
            log_total, teacher_log_total = total.log(), teacher_total.log()
            out[0, rows], out[3, rows] = peak[:, 0] + log_total, teacher_peak[:, 0] + teacher_log_total
            gap = z - u
            out[1, rows] = log_total - z.mul_(e).sum(1) / total
            out[4, rows] = teacher_log_total - u.mul_(f).sum(1) / teacher_total
            out[5, rows] = e.mul_(gap).sum(1) / total - log_total + teacher_log_total
            out[6, rows] = -f.mul_(gap).sum(1) / teacher_total - teacher_log_total + log_total

    def mixture(self, pair: LogitPair, *, lse: Tensor, teacher_lse: Tensor, beta: float, out: Tensor) -> None:
        logits, others, inverse_temperature, teacher_inverse_temperature = pair
        p_block, q_block = workspaces(logits, out.dtype)
        for rows in blocks(logits, len(p_block)):
            n = rows.stop - rows.start
            log_p, log_q = p_block[:n], q_block[:n]
            normalised(logits[rows], inverse_temperature[rows], lse[rows], out=log_p)
            normalised(others[rows], teacher_inverse_temperature[rows], teacher_lse[rows], out=log_q)
            ratio = log_ratio_to_mixture(log_p, log_q, beta)
            out[0, rows] = (log_p.exp() * ratio).sum(1)
            out[1, rows] = ratio.add_(log_q - log_p).mul_(log_q.exp()).sum(1)

    def write_gradient(self, logits: Tensor, term: PolicyTerm, beside: DivergenceTerm) -> None:
        slope, weight = SLOPES[beside.divergence], beside.weight * term.inverse_temperature
        p_block, q_block, g_block = workspaces(logits, term.lse.dtype, count=3)
        for rows in blocks(logits, len(p_block)):
            n, here = rows.stop - rows.start, term.rows(rows)
            log_p, log_q, g = p_block[:n], q_block[:n], g_block[:n]
            normalised(logits[rows], here.inverse_temperature, beside.lse[rows], out=log_p)
            normalised(beside.others[rows], beside.inverse_temperature[rows], beside.teacher_lse[rows], out=log_q)
            pull = slope(log_p, log_q, beside.mean[rows], beside.beta).mul_(weight[rows, None])
            policy_gradient(normalised(logits[rows], here.inverse_temperature, here.lse, out=log_p), here, out=g)
            logits[rows] = g.add_(pull)
