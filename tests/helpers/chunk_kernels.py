"""Chunks of logits for the log-prob head's kernels, and what float64 makes of them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.parallel.head.kernels import ChunkKernels, PolicyTerm
from tests.helpers.compare import assert_within

ELSEWHERE = 16  # columns of the vocabulary that other ranks hold; rows stay aligned
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProblem:
    """Logits [n, V + 16] of a whole vocabulary, of which a rank holds the first V; a loss Σ g_l·log p(label) + g_H·H.

    labels: [n], of the whole vocabulary. inverse_temperature, grad_logprobs: [n] float32; grad_entropy too, or None.
    """

    whole: Tensor
    labels: Tensor
    inverse_temperature: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor | None

    @property
    def num_columns(self) -> int:
        return self.whole.shape[1] - ELSEWHERE

    @property
    def local_labels(self) -> Tensor:
        return self.labels.where(self.labels < self.num_columns, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """statistics: [3, n]. gradient: [n, V]. lse, entropy: [n], of the whole vocabulary. In float64 on CPU if dense."""

    statistics: Tensor
    gradient: Tensor
    lse: Tensor
    entropy: Tensor


# (name of a dtype, rows, columns, with entropy): each size with and without, in one dtype each.
SHAPES = [
    (dtype, n, V, (number % 2 == 0) == (dtype == "bfloat16"))
    for dtype in ("bfloat16", "float32")
    for number, (n, V) in enumerate(itertools.product((0, 1, 5), (1, 7, 1000, 4097)))
]


def chunk_problem(
    *,
    num_rows: int = 5,
    num_columns: int = 1000,
    dtype: torch.dtype = torch.float32,
    with_entropy: bool = True,
    change: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> ChunkProblem:
    """Logits of deviation 2, changed by `change`; temperatures ½ to 2; every third label is held elsewhere.

    A label whose logit would be −∞ is the column in the middle instead.
    """
    generator = torch.Generator().manual_seed(1000 * num_rows + num_columns)
    logits = change(2 * torch.randn(num_rows, num_columns + ELSEWHERE, generator=generator))
    labels = torch.randint(num_columns, (num_rows,), generator=generator)
    labels[1::3] = num_columns + 2
    labels = labels.where(logits.gather(1, labels[:, None])[:, 0] > -torch.inf, num_columns // 2)
    return ChunkProblem(
        whole=logits.to(dtype),
        labels=labels,
        inverse_temperature=torch.tensor([2.0, 1.0, 0.7, 0.5])[torch.arange(num_rows) % 4],
        grad_logprobs=torch.randn(num_rows, generator=generator),
        grad_entropy=torch.randn(num_rows, generator=generator) if with_entropy else None,
    )


def dense_chunk(problem: ChunkProblem) -> ChunkResult:
    """float64 log_softmax of the whole vocabulary and its autograd; −∞ is a number whose exponential is 0."""
    V = problem.num_columns
    logits = problem.whole.double().clamp(min=-1e30).requires_grad_()
    z = logits * problem.inverse_temperature.double()[:, None]
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    label_logit = z.gather(1, problem.labels[:, None])[:, 0]
    loss = (problem.grad_logprobs * log_p.gather(1, problem.labels[:, None])[:, 0]).sum()
    if problem.grad_entropy is not None:
        loss = loss + (problem.grad_entropy * entropy).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    local = z[:, :V].log_softmax(-1)
    statistics = [z[:, :V].logsumexp(-1), -(local.exp() * local).sum(-1), label_logit.where(problem.labels < V, 0.0)]
    return ChunkResult(
        statistics=torch.stack(statistics).detach(),
        gradient=gradient[:, :V],
        lse=z.logsumexp(-1).detach(),
        entropy=entropy.detach(),
    )


def run_chunk(kernels: ChunkKernels, problem: ChunkProblem, device: str = "cpu") -> ChunkResult:
    """What kernels make of a problem: `out` and the logits are parts of wider tensors, as in the head."""
    n, V, dense = len(problem.whole), problem.num_columns, dense_chunk(problem)
    buffer = problem.whole.to(device, copy=True)
    logits, out = buffer[:, :V], torch.full((3, n + 2), torch.nan, device=device)[:, 1 : n + 1]
    inverse_temperature, labels = problem.inverse_temperature.to(device), problem.local_labels.to(device)
    kernels.statistics(logits, inverse_temperature, labels, out)
    assert torch.equal(buffer.cpu(), problem.whole)
    g_l, g_H = problem.grad_logprobs, problem.grad_entropy
    kernels.write_gradient(
        logits,
        PolicyTerm(
            inverse_temperature=inverse_temperature,
            labels=labels,
            lse=dense.lse.float().to(device),
            grad_logprobs=g_l.to(device),
            a=(g_l if g_H is None else g_l + g_H * dense.entropy).float().to(device),
            b=None if g_H is None else g_H.to(device),
        ),
    )
    assert torch.equal(buffer[:, V:].cpu(), problem.whole[:, V:])
    return ChunkResult(statistics=out.cpu(), gradient=logits.cpu(), lse=dense.lse, entropy=dense.entropy)


def assert_exact(got: ChunkResult, problem: ChunkProblem) -> None:
    """Within float32's steps of z for the statistics, and one step more of the logits' dtype for gradients."""
    expected = dense_chunk(problem)
    steps_of_z = EPS * float(expected.statistics[::2].abs().max()) if len(problem.whole) else 0.0
    for i, name in enumerate(("lse", "entropy", "label logit")):
        atol = 1e-5 if name == "entropy" else 1e-5 + 4 * steps_of_z
        assert_within(name, got.statistics[i], expected.statistics[i], atol=atol)
    largest = float(expected.gradient.abs().max()) if len(problem.whole) else 0.0
    relative = 1e-5 + 8 * steps_of_z + torch.finfo(problem.whole.dtype).eps
    assert_within("gradient", got.gradient.double(), expected.gradient, atol=largest * relative)
