"""Implement the computations on a chunk of student and teacher logits as Triton kernels; each passes over both once.

Statistics are an online softmax of both rows, as in `triton_kernels`. With c = log₂e/T, the largest logit M so far and
x_v = (r_v − M)·c of the student, and y_v likewise of the teacher:  s = Σ 2^{x_v}, t = Σ 2^{y_v}, and for KL(p‖q) the
sum  k = Σ 2^{x_v} (x_v − y_v).  When the maxima grow, x changes by d and y by e:  k ← 2^d (k + (d − e)·s).  At the end
KL(p‖q) = ln 2 · k/s − ln s + ln t,  which is exactly 0 where both rows are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import triton
import triton.language as tl
from torch import Tensor

from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.kernels import PolicyTerm
from megarl.parallel.head.teacher_kernels import DivergenceTerm, LogitPair
from megarl.parallel.head.triton_kernels import LN_2, LOG2_E, LOWEST, each_contiguous, policy_gradient, rows_of

# Compiled into the kernel of gradients.
KINDS: Mapping[Divergence, int] = MappingProxyType({Divergence.REVERSE: 0, Divergence.FORWARD: 1, Divergence.JSD: 2})


@triton.jit
def _statistics_kernel(
    logits: "Tensor",
    row_stride: int,
    others: "Tensor",
    other_stride: int,
    V: int,
    inverse_temperature: "Tensor",
    teacher_inverse_temperature: "Tensor",
    labels: "Tensor",
    out: "Tensor",
    statistic_stride: int,
    out_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the ten statistics of a row of both logits; one Triton program per row."""
    row = tl.program_id(0).to(tl.int64)
    first, other_first, written = logits + row * row_stride, others + row * other_stride, out + row * out_stride
    inverse = tl.load(inverse_temperature + row).to(tl.float32)
    other_inverse = tl.load(teacher_inverse_temperature + row).to(tl.float32)
    c, other_c = inverse * LOG2_E, other_inverse * LOG2_E
    peak, zeros = tl.full([], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    other_peak, beside = peak, peak
    mass, moment, cross, other_mass, other_moment, other_cross = zeros, zeros, zeros, zeros, zeros, zeros
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        r = tl.load(first + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        s = tl.load(other_first + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        block_peak = tl.max(r, 0)
        higher, other_higher = tl.maximum(peak, block_peak), tl.maximum(other_peak, tl.max(s, 0))
        at_peak = tl.max(tl.where(r == block_peak, s, -float("inf")), 0)
        at_peak = tl.maximum(at_peak, tl.where(block_peak == peak, beside, LOWEST))
        beside = tl.where(block_peak < peak, beside, at_peak)
        d, e = (peak - higher) * c, (other_peak - other_higher) * other_c
        rescale, other_rescale = tl.exp2(d), tl.exp2(e)
        # 0·∞ where what came before is nothing beside this block.
        moment = tl.where(rescale > 0, rescale * (moment + d * mass), 0.0)
        cross = tl.where(rescale > 0, rescale * (cross + (d - e) * mass), 0.0)
        other_moment = tl.where(other_rescale > 0, other_rescale * (other_moment + e * other_mass), 0.0)
        other_cross = tl.where(other_rescale > 0, other_rescale * (other_cross + (e - d) * other_mass), 0.0)
        peak, other_peak = higher, other_higher
        x, y = (r - peak) * c, (s - other_peak) * other_c
        share, other_share = tl.exp2(x), tl.exp2(y)
        mass, other_mass = mass * rescale + share, other_mass * other_rescale + other_share
        moment += tl.where(share > 0, share * x, 0.0)
        cross += tl.where(share > 0, share * (x - y), 0.0)
        other_moment += tl.where(other_share > 0, other_share * y, 0.0)
        other_cross += tl.where(other_share > 0, other_share * (y - x), 0.0)
    label, total, other_total = tl.load(labels + row), tl.sum(mass, 0), tl.sum(other_mass, 0)
    log_total, other_log_total = tl.log(total), tl.log(other_total)
    label_logit = tl.load(first + label, mask=label >= 0, other=0.0).to(tl.float32) * inverse
    tl.store(written, peak * inverse + log_total)
    tl.store(written + statistic_stride, log_total - LN_2 * tl.sum(moment, 0) / total)
    tl.store(written + 2 * statistic_stride, label_logit)
    tl.store(written + 3 * statistic_stride, other_peak * other_inverse + other_log_total)
    tl.store(written + 4 * statistic_stride, other_log_total - LN_2 * tl.sum(other_moment, 0) / other_total)
    tl.store(written + 5 * statistic_stride, tl.sum(cross, 0) / total * LN_2 - log_total + other_log_total)
    tl.store(written + 6 * statistic_stride, tl.sum(other_cross, 0) / other_total * LN_2 - other_log_total + log_total)
    tl.store(written + 7 * statistic_stride, peak * inverse)
    tl.store(written + 8 * statistic_stride, other_peak * other_inverse)
    tl.store(written + 9 * statistic_stride, beside * other_inverse)


@triton.jit
def _mixture_kernel(
    logits: "Tensor",
    row_stride: int,
    others: "Tensor",
    other_stride: int,
    V: int,
    inverse_temperature: "Tensor",
    teacher_inverse_temperature: "Tensor",
    lse: "Tensor",
    teacher_lse: "Tensor",
    beta: float,
    out: "Tensor",
    statistic_stride: int,
    out_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    """Compute a row's parts of KL(p‖m) and KL(q‖m); one Triton program per row."""
    row = tl.program_id(0).to(tl.int64)
    first, other_first = logits + row * row_stride, others + row * other_stride
    inverse = tl.load(inverse_temperature + row).to(tl.float32)
    other_inverse = tl.load(teacher_inverse_temperature + row).to(tl.float32)
    log_total, other_log_total = tl.load(lse + row).to(tl.float32), tl.load(teacher_lse + row).to(tl.float32)
    of_p = tl.zeros([BLOCK], tl.float32)
    of_q = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        r = tl.load(first + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        s = tl.load(other_first + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        log_p, log_q = r * inverse - log_total, s * other_inverse - other_log_total
        gap = log_p - log_q
        # log m less the larger of log p and log q.
        above = tl.log(1.0 + tl.where(gap < 0, 1.0 - beta, beta) * (tl.exp(-tl.abs(gap)) - 1.0))
        p, q = tl.exp(log_p), tl.exp(log_q)
        of_p += tl.where(p > 0, p * (tl.minimum(gap, 0.0) - above), 0.0)
        of_q += tl.where(q > 0, q * (tl.minimum(-gap, 0.0) - above), 0.0)
    written = out + row * out_stride
    tl.store(written, tl.sum(of_p, 0))
    tl.store(written + statistic_stride, tl.sum(of_q, 0))


@triton.jit
def _gradient_kernel(
    logits: "Tensor",
    row_stride: int,
    others: "Tensor",
    other_stride: int,
    V: int,
    inverse_temperature: "Tensor",
    teacher_inverse_temperature: "Tensor",
    labels: "Tensor",
    lse: "Tensor",
    grad_logprobs: "Tensor",
    a: "Tensor",
    b: "Tensor | None",
    student_lse: "Tensor",
    teacher_lse: "Tensor",
    mean: "Tensor",
    weight: "Tensor",
    beta: float,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Overwrite a block of columns of one row of the student's logits by its gradient; one Triton program per block."""
    blocks_per_row = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    block = logits + row * row_stride + columns
    inverse = tl.load(inverse_temperature + row).to(tl.float32)
    r = tl.load(block, mask=columns < V, other=-float("inf")).to(tl.float32)
    s = tl.load(others + row * other_stride + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
    log_p = r * inverse - tl.load(student_lse + row).to(tl.float32)
    log_q = s * tl.load(teacher_inverse_temperature + row).to(tl.float32) - tl.load(teacher_lse + row).to(tl.float32)
    p = tl.exp(log_p)
    if KIND == 0:
        slope = tl.where(p > 0, p * (log_p - log_q - tl.load(mean + row).to(tl.float32)), 0.0)
    elif KIND == 1:
        slope = p - tl.exp(log_q)
    else:
        gap = log_p - log_q
        above = tl.log(1.0 + tl.where(gap < 0, 1.0 - beta, beta) * (tl.exp(-tl.abs(gap)) - 1.0))
        slope = tl.where(
            p > 0, (1.0 - beta) * p * (tl.minimum(gap, 0.0) - above - tl.load(mean + row).to(tl.float32)), 0.0
        )
    gradient = policy_gradient(r * inverse, columns, row, labels, lse, grad_logprobs, a, b)
    gradient += slope * tl.load(weight + row).to(tl.float32)
    tl.store(block, gradient * inverse, mask=columns < V)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonTeacherKernels:
    """The kernels of `TeacherKernels` in Triton, for logits of 16 or 32 bits on a GPU; they compute in float32.

    Rows are aligned as in `TritonKernels`. Programs that hold sums of both rows take blocks of half its size.
    """

    block: int = 1024
    num_warps: int = 4

    def statistics(self, pair: LogitPair, labels: Tensor, out: Tensor) -> None:
        """Compute the statistics that `TeacherKernels.statistics` defines; refuse what `TritonKernels` does."""
        both = rows_of(pair.logits, pair.others)
        if len(out[0]):
            _statistics_kernel[(len(out[0]),)](
                *both,
                *each_contiguous(pair.inverse_temperature, pair.teacher_inverse_temperature, labels),
                out,
                *out.stride(),
                BLOCK=self.block,
                num_warps=self.num_warps,
            )

    def mixture(self, pair: LogitPair, *, lse: Tensor, teacher_lse: Tensor, beta: float, out: Tensor) -> None:
        """Compute the parts that `TeacherKernels.mixture` defines."""
        both = rows_of(pair.logits, pair.others)
        if len(lse):
            _mixture_kernel[(len(lse),)](
                *both,
                *each_contiguous(pair.inverse_temperature, pair.teacher_inverse_temperature, lse, teacher_lse),
                beta,
                out,
                *out.stride(),
                BLOCK=self.block,
                num_warps=self.num_warps,
            )

    def write_gradient(self, logits: Tensor, term: PolicyTerm, beside: DivergenceTerm) -> None:
        """Overwrite the logits by the gradient that `TeacherKernels.write_gradient` defines."""
        both = rows_of(logits, beside.others)
        if len(logits):
            _gradient_kernel[(len(logits) * triton.cdiv(logits.shape[1], self.block),)](
                *both,
                *each_contiguous(term.inverse_temperature, beside.inverse_temperature, *term.by_label()),
                *each_contiguous(beside.lse, beside.teacher_lse, beside.mean, beside.weight),
                beside.beta,
                KIND=KINDS[beside.divergence],
                BLOCK=self.block,
                num_warps=self.num_warps,
            )
