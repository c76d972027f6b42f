"""Check the kernels of the log-prob head, forward and backward, against float64 log_softmax and autograd.

The tensors are small and of awkward shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.parallel.head.kernels import ChunkKernels, PolicyTerm

# Columns of the vocabulary that another rank holds, and of the buffer that no kernel may touch. With 16 of them some
# rows are aligned as in a real vocabulary and some are not.
_ELSEWHERE = 16
_UNTOUCHED = 0.75
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestCase:
    """A self-test case with random logits offset + deviation·N(0, 1), at temperatures ½, 1 and 2 in turn.

    Every third label is −1, as if it were in another rank's vocabulary shard.
    """

    name: str
    num_columns: int
    offset: float = 0.0
    deviation: float = 2.0
    with_entropy: bool = True
    num_rows: int = 6


CASES = (
    SelfTestCase(name="one column", num_columns=1),
    SelfTestCase(name="seven columns, no entropy", num_columns=7, with_entropy=False),
    SelfTestCase(name="an odd number of columns", num_columns=4097),
    SelfTestCase(name="aligned rows, no entropy", num_columns=8192, with_entropy=False),
    SelfTestCase(name="very negative logits", num_columns=1000, offset=-2e4, deviation=200.0),
    SelfTestCase(name="dominant logits", num_columns=4097, deviation=50.0),
)


def self_test(kernels: ChunkKernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the first failure (case, largest difference, tolerance), or None if the kernels pass in every case."""
    for case in CASES:
        for check in _checks(case, kernels, device, dtype):
            if disagreement := check.disagreement():
                return f"{case.name} in {dtype}: {disagreement}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """A result of the kernels beside its float64 value; it passes if |got − expected| ≤ atol + rtol·|expected|."""

    name: str
    got: Tensor
    expected: Tensor
    atol: float = 0.0
    rtol: float = 0.0

    def disagreement(self) -> str:
        """Describe the largest difference if the comparison fails, or return "" if it passes. A NaN fails."""
        difference = (self.got.double().cpu() - self.expected).abs().nan_to_num(nan=torch.inf).flatten()
        allowed = (self.atol + self.rtol * self.expected.abs()).flatten()
        worst = int((difference - allowed).argmax())
        if difference[worst] <= allowed[worst]:
            return ""
        return f"{self.name} differs by {difference[worst].item():.3g}, allowed {allowed[worst].item():.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A self-test case's inputs, and the expected results, computed in float64 on CPU.

    buffer: [n, V + 16], whose first V columns are the logits, in their dtype. labels: [n], −1 if on another rank.
    statistics: [3, n]. gradient: [n, V]. lse, entropy: [n], of the whole vocabulary.
    """

    buffer: Tensor
    inverse_temperature: Tensor
    labels: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    statistics: Tensor
    gradient: Tensor
    lse: Tensor
    entropy: Tensor


def _make_problem(case: SelfTestCase, dtype: torch.dtype) -> _Problem:
    generator = torch.Generator().manual_seed(case.num_columns)
    n, V = case.num_rows, case.num_columns
    whole = torch.randn(n, V + _ELSEWHERE, generator=generator, dtype=torch.float64) * case.deviation + case.offset
    whole = whole.to(dtype).double()
    labels = torch.randint(V, (n,), generator=generator)
    labels[::3] = V + 1
    inverse_temperature = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)[torch.arange(n) % 3]
    grad_logprobs = torch.randn(n, generator=generator, dtype=torch.float64)
    grad_entropy = torch.randn(n, generator=generator, dtype=torch.float64) * case.with_entropy

    logits = whole.clone().requires_grad_()
    z = logits * inverse_temperature[:, None]
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = grad_logprobs @ log_p.gather(1, labels[:, None])[:, 0] + grad_entropy @ entropy
    (gradient,) = torch.autograd.grad(loss, logits)
    here = z[:, :V].log_softmax(-1)
    owned_logit = z.gather(1, labels[:, None])[:, 0].where(labels < V, 0.0)
    statistics = torch.stack([z[:, :V].logsumexp(-1), -(here.exp() * here).sum(-1), owned_logit])
    buffer = torch.full_like(whole, _UNTOUCHED)
    buffer[:, :V] = whole[:, :V]
    return _Problem(
        buffer=buffer.to(dtype),
        inverse_temperature=inverse_temperature,
        labels=labels.where(labels < V, -1),
        grad_logprobs=grad_logprobs,
        grad_entropy=grad_entropy,
        statistics=statistics.detach(),
        gradient=gradient[:, :V],
        lse=z.logsumexp(-1).detach(),
        entropy=entropy.detach(),
    )


def _checks(
    case: SelfTestCase, kernels: ChunkKernels, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCheck]:
    """Run the kernels on one case, and yield each result beside the expected float64 one."""
    problem = _make_problem(case, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    buffer = problem.buffer.to(device, copy=True)
    logits, beyond = buffer[:, : case.num_columns], buffer[:, case.num_columns :]
    inverse_temperature, labels = problem.inverse_temperature.to(device, wide), problem.labels.to(device)

    out = torch.full((3, case.num_rows), torch.nan, dtype=wide, device=device)
    kernels.statistics(logits, inverse_temperature, labels, out)
    lse, entropy, label_logit = problem.statistics
    yield KernelCheck(name="lse", got=out[0], expected=lse, atol=1e-5, rtol=4 * EPS)
    # Sums of thousands of float32 numbers in whatever order, relative to their result.
    yield KernelCheck(name="entropy", got=out[1], expected=entropy, atol=1e-5, rtol=32 * EPS)
    yield KernelCheck(name="label logit", got=out[2], expected=label_logit, rtol=4 * EPS)
    yield KernelCheck(name="logits after the statistics", got=buffer, expected=problem.buffer.double())

    kernels.write_gradient(
        logits,
        PolicyTerm(
            inverse_temperature=inverse_temperature,
            labels=labels,
            lse=problem.lse.to(device, wide),
            grad_logprobs=problem.grad_logprobs.to(device, wide),
            a=(problem.grad_logprobs + problem.grad_entropy * problem.entropy).to(device, wide),
            b=problem.grad_entropy.to(device, wide) if case.with_entropy else None,
        ),
    )
    # A probability is as wrong as its logarithm: by float32 steps of z and lse.
    error = problem.gradient.abs().max().item() * (1e-5 + 8 * EPS * problem.lse.abs().max().item())
    rounding = torch.finfo(dtype).eps
    yield KernelCheck(name="gradient", got=logits, expected=problem.gradient, atol=error, rtol=rounding)
    yield KernelCheck(
        name="what lies beyond the logits", got=beyond, expected=problem.buffer.double()[:, case.num_columns :]
    )
