"""Implement the two computations on a chunk of logits as Triton kernels; both pass over memory only once.

The matrix product h·Wᵀ, which gives the logits, stays with the vendor's library. A pass over the logits is bound by
memory: it moves 2 bytes per bfloat16 logit, for which the product needs 2·H FLOP. At H = 4096, on a device with 200
FLOP per byte, a pass takes a twentieth of the product's time, so fusing both would save no more than that.

Statistics are an online softmax (Milakov and Gimelshein 2018) in float32. With c = log₂e/T, the largest logit M so far
and u_v = (r_v − M)·c:  s = Σ 2^{u_v} and t = Σ 2^{u_v} u_v. When M grows by δ, d = −δ·c rescales both sums exactly:
    t ← 2^d (t + d·s),      s ← 2^d s.
At the end  lse = M/T + ln s  and  H = ln s − ln 2 · t/s.  Both terms of H are ≥ 0, so that nothing cancels. H depends
only on differences of raw logits, so it stays exact if the logits are far from 0.
"""

import subprocess
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.parallel.head.kernels import PolicyTerm

# Errors of the first launch of a kernel where it cannot be compiled: Triton's own errors, no usable driver or C
# compiler (RuntimeError), a C compiler that fails, no libcuda (AssertionError), a cache folder that cannot be written
# (OSError) or that nothing can be loaded from (ImportError).
LAUNCH_ERRORS = (triton.TritonError, RuntimeError, subprocess.CalledProcessError, AssertionError, OSError, ImportError)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# A finite start: −∞ minus −∞ would be no number in rows that begin with −∞.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _statistics_kernel(
    logits: "Tensor",
    row_stride: int,
    V: int,
    inverse_temperature: "Tensor",
    labels: "Tensor",
    out: "Tensor",
    statistic_stride: int,
    out_stride: int,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the three statistics (lse, entropy, label's z) of a row of logits; one Triton program per row."""
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * row_stride
    inverse = tl.load(inverse_temperature + row).to(tl.float32)
    c = inverse * LOG2_E
    peak = tl.full([], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        r = tl.load(first + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(r, 0))
        d = (peak - higher) * c
        rescale = tl.exp2(d)
        # 0·∞ where what came before is nothing beside this block.
        moment = tl.where(rescale > 0, rescale * (moment + d * mass), 0.0)
        peak = higher
        u = (r - peak) * c
        share = tl.exp2(u)
        mass = mass * rescale + share
        moment += tl.where(share > 0, share * u, 0.0)
    total = tl.sum(mass, 0)
    log_total = tl.log(total)
    label = tl.load(labels + row)
    label_logit = tl.load(first + label, mask=label >= 0, other=0.0).to(tl.float32)
    written = out + row * out_stride
    tl.store(written, peak * inverse + log_total)
    tl.store(written + statistic_stride, log_total - LN_2 * tl.sum(moment, 0) / total)
    tl.store(written + 2 * statistic_stride, label_logit * inverse)


@triton.jit
def _gradient_kernel(
    logits: "Tensor",
    row_stride: int,
    V: int,
    inverse_temperature: "Tensor",
    labels: "Tensor",
    lse: "Tensor",
    grad_logprobs: "Tensor",
    a: "Tensor",
    b: "Tensor | None",
    BLOCK: tl.constexpr,
) -> None:
    """Overwrite a block of columns of one row of logits by its gradient; one Triton program per block."""
    blocks_per_row = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    block = logits + row * row_stride + columns
    inverse = tl.load(inverse_temperature + row).to(tl.float32)
    r = tl.load(block, mask=columns < V, other=-float("inf")).to(tl.float32)
    gradient = policy_gradient(r * inverse, columns, row, labels, lse, grad_logprobs, a, b)
    tl.store(block, gradient * inverse, mask=columns < V)


@triton.jit
def policy_gradient(
    z: "Tensor",
    columns: "Tensor",
    row: "Tensor",
    labels: "Tensor",
    lse: "Tensor",
    grad_logprobs: "Tensor",
    a: "Tensor",
    b: "Tensor | None",
) -> "Tensor":
    """Return the gradient of log-prob and entropy with respect to a block's z."""
    log_p = z - tl.load(lse + row).to(tl.float32)
    p = tl.exp(log_p)
    pulled = p * tl.load(a + row).to(tl.float32)
    if b is not None:
        # 0·∞ where a logit is −∞.
        pulled += tl.where(log_p == -float("inf"), 0.0, p * log_p) * tl.load(b + row).to(tl.float32)
    pushed = tl.where(columns == tl.load(labels + row), tl.load(grad_logprobs + row).to(tl.float32), 0.0)
    return pushed - pulled


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonKernels:
    """The kernels of `ChunkKernels` in Triton, for logits of 16 or 32 bits on a GPU; they compute in float32.

    Rows whose stride and length are multiples of 16 are read 16 bytes at a time; other rows work but are slower. block:
    columns that a program works on at a time, a power of 2. With the default, a multiprocessor of a Hopper GPU holds
    eight programs (64 registers per thread), so that a chunk of 1024 rows is one wave of programs.
    """

    block: int = 2048
    num_warps: int = 4

    def statistics(self, logits: Tensor, inverse_temperature: Tensor, labels: Tensor, out: Tensor) -> None:
        """Compute the statistics that `ChunkKernels.statistics` defines.

        Raise ValueError for other dtypes than 16 or 32 bits, and for logits whose columns are not contiguous.
        """
        rows = rows_of(logits)
        if len(logits):
            _statistics_kernel[(len(logits),)](
                *rows,
                *each_contiguous(inverse_temperature, labels),
                out,
                *out.stride(),
                BLOCK=self.block,
                num_warps=self.num_warps,
            )

    def write_gradient(self, logits: Tensor, term: PolicyTerm) -> None:
        """Overwrite the logits by the gradient that `ChunkKernels.write_gradient` defines.

        Raise ValueError for other dtypes than 16 or 32 bits, and for logits whose columns are not contiguous.
        """
        rows = rows_of(logits)
        if len(logits):
            _gradient_kernel[(len(logits) * triton.cdiv(logits.shape[1], self.block),)](
                *rows,
                *each_contiguous(term.inverse_temperature, *term.by_label()),
                BLOCK=self.block,
                num_warps=self.num_warps,
            )


def rows_of(*tables: Tensor) -> tuple[Tensor | int, ...]:
    """Return a kernel's first arguments: each table of logits with the stride of its rows, then their length."""
    for logits in tables:
        if logits.dtype not in _DTYPES:
            raise ValueError(f"logits are {logits.dtype}, expected one of {_DTYPES}; use TorchKernels for others")
        if logits.shape[1] > 1 and logits.stride(1) != 1:
            raise ValueError(f"logits have column stride {logits.stride(1)}, expected 1; pass them row by row")
    return *(part for logits in tables for part in (logits, logits.stride(0))), tables[0].shape[1]


def each_contiguous(*values: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(value if value is None else value.contiguous() for value in values)
