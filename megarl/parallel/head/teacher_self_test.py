"""Check the kernels for divergences, forward and backward, against float64 log_softmax and autograd.

The tensors are small and of awkward shapes, as those of `self_test`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.kernels import PolicyTerm
from megarl.parallel.head.self_test import EPS, KernelCheck, SelfTestCase
from megarl.parallel.head.teacher_kernels import NUM_BOTH, NUM_OWN, DivergenceTerm, LogitPair, TeacherKernels

# Columns of the vocabulary that another rank holds.
_ELSEWHERE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherCase(SelfTestCase):
    """A self-test case with random logits of the student and the teacher.

    equal: the teacher has the student's logits and temperatures.
    """

    divergence: Divergence
    beta: float = 0.5
    equal: bool = False


TEACHER_CASES = (
    TeacherCase(name="one column", num_columns=1, divergence=Divergence.REVERSE),
    TeacherCase(name="reverse, no entropy", num_columns=4097, divergence=Divergence.REVERSE, with_entropy=False),
    TeacherCase(name="forward", num_columns=4097, divergence=Divergence.FORWARD),
    TeacherCase(name="JSD", num_columns=4097, divergence=Divergence.JSD, beta=0.1),
    TeacherCase(name="aligned rows, JSD", num_columns=8192, divergence=Divergence.JSD, with_entropy=False),
    TeacherCase(name="very negative", num_columns=1000, divergence=Divergence.REVERSE, offset=-2e3, deviation=20.0),
    TeacherCase(name="dominant, JSD", num_columns=1000, divergence=Divergence.JSD, deviation=30.0),
    TeacherCase(name="the student itself", num_columns=4097, divergence=Divergence.REVERSE, equal=True),
    TeacherCase(name="the student itself, JSD", num_columns=4097, divergence=Divergence.JSD, equal=True),
)


def teacher_self_test(kernels: TeacherKernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the first failure (case, largest difference, tolerance), or None if the kernels pass in every case."""
    for case in TEACHER_CASES:
        for check in _checks(case, kernels, device, dtype):
            if disagreement := check.disagreement():
                return f"{case.name} in {dtype}: {disagreement}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dense:
    """The answer of a case in float64. log_p, log_q: [n, V + 16]. statistics: [10, n]. mixture: [2, n]. lse,
    teacher_lse, entropy, mean: [n], of the whole vocabulary. gradient: [n, V].
    """

    lse: Tensor
    teacher_lse: Tensor
    entropy: Tensor
    mean: Tensor
    statistics: Tensor
    mixture: Tensor
    gradient: Tensor


def _solve(
    case: TeacherCase, logits: Tensor, others: Tensor, scales: Tensor, labels: Tensor, weights: Tensor
) -> _Dense:
    """Solve a case by dense tensors. scales: [2, n] inverse temperatures. weights: [3, n] gradients of the loss."""
    V, logits = case.num_columns, logits.requires_grad_()
    z, u = logits * scales[0, :, None], others * scales[1, :, None]
    log_p, log_q = z.log_softmax(-1), u.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    # For equal models it is log_p to the bit, which log(exp(log_p)) is not on every CPU.
    log_m = log_p if case.equal else torch.log((1 - case.beta) * p + case.beta * q)
    reverse, forward = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
    of_p, of_q = (p * (log_p - log_m))[:, :V].sum(-1), (q * (log_q - log_m))[:, :V].sum(-1)
    whole_p, whole_q = (p * (log_p - log_m)).sum(-1), (q * (log_q - log_m)).sum(-1)
    values = {
        Divergence.REVERSE: (reverse, reverse),
        Divergence.FORWARD: (forward, forward),
        Divergence.JSD: ((1 - case.beta) * whole_p + case.beta * whole_q, whole_p),
    }
    value, mean = values[case.divergence]
    entropy = -(p * log_p).sum(-1)
    loss = weights[0] @ log_p.gather(1, labels[:, None])[:, 0] + weights[1] @ entropy + weights[2] @ value
    (gradient,) = torch.autograd.grad(loss, logits)
    here, there = z[:, :V].log_softmax(-1), u[:, :V].log_softmax(-1)
    peak = z[:, :V].amax(-1)
    statistics = [
        z[:, :V].logsumexp(-1),
        -(here.exp() * here).sum(-1),
        z.gather(1, labels[:, None])[:, 0].where(labels < V, 0.0),
        u[:, :V].logsumexp(-1),
        -(there.exp() * there).sum(-1),
        (here.exp() * (here - there)).sum(-1),
        (there.exp() * (there - here)).sum(-1),
        peak,
        u[:, :V].amax(-1),
        u[:, :V].masked_fill(z[:, :V] < peak[:, None], -torch.inf).amax(-1),
    ]
    return _Dense(
        lse=z.logsumexp(-1).detach(),
        teacher_lse=u.logsumexp(-1),
        entropy=entropy.detach(),
        mean=mean.detach(),
        statistics=torch.stack(statistics).detach(),
        mixture=torch.stack([of_p, of_q]).detach(),
        gradient=gradient[:, :V],
    )


def _draw(case: TeacherCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both logits [2, n, V + 16], inverse temperatures [2, n], labels [n], and gradients of the loss [3, n]."""
    generator = torch.Generator().manual_seed(case.num_columns)
    n, V = case.num_rows, case.num_columns
    both = torch.randn(2, n, V + _ELSEWHERE, generator=generator, dtype=torch.float64)
    both = (both * case.deviation + case.offset).to(dtype)
    scales = torch.tensor([[2.0, 1.0, 0.5], [1.0, 0.5, 1.0]], dtype=torch.float64)[:, torch.arange(n) % 3]
    labels = torch.randint(V, (n,), generator=generator)
    labels[::3] = V + 1
    weights = torch.randn(3, n, generator=generator, dtype=torch.float64)
    weights[1] *= case.with_entropy
    if case.equal:
        both[1], scales[1] = both[0], scales[0]
        weights[:2] = 0.0
    return both, scales, labels, weights


def _checks(
    case: TeacherCase, kernels: TeacherKernels, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCheck]:
    """Run the kernels on one case, and yield each result beside the expected float64 one."""
    both, scales, labels, weights = _draw(case, dtype)
    n, V, wide = case.num_rows, case.num_columns, torch.promote_types(dtype, torch.float32)
    dense = _solve(case, both[0].double(), both[1].double(), scales, labels, weights)
    logits, others = (each.to(device, copy=True)[:, :V] for each in both)
    scale, teacher_scale = scales.to(device, wide)
    local = labels.where(labels < V, -1).to(device)
    out = torch.full((NUM_OWN + NUM_BOTH, n), torch.nan, dtype=wide, device=device)
    pair = LogitPair(logits, others, scale, teacher_scale)
    kernels.statistics(pair, local, out)
    # Sums of thousands of float32 numbers in whatever order, relative to the largest result.
    for name, rows, atol in (("lse", [0, 3], 1e-5), ("entropy or KL", [1, 4, 5, 6], 1e-5), ("logit", [2, 7, 8, 9], 0)):
        expected = dense.statistics[rows]
        yield KernelCheck(
            name=name, got=out[rows], expected=expected, atol=atol + 32 * EPS * float(expected.abs().max())
        )
    if case.equal:
        yield KernelCheck(name="KL from itself", got=out[5:7], expected=torch.zeros(2, n))
    after = torch.stack([logits, others])
    yield KernelCheck(name="logits after the statistics", got=after, expected=both.double()[:, :, :V])

    lse, teacher_lse, mean = (each.to(device, wide) for each in (dense.lse, dense.teacher_lse, dense.mean))
    by_logprobs, by_entropy, weight = weights.to(device, wide)
    # Log-probs are wrong by float32 steps of z and lse.
    step = 1e-5 + 8 * EPS * float(torch.maximum(dense.lse.abs(), dense.teacher_lse.abs()).max())
    mixture = torch.full((2, n), torch.nan, dtype=wide, device=device)
    kernels.mixture(pair, lse=lse, teacher_lse=teacher_lse, beta=case.beta, out=mixture)
    yield KernelCheck(name="KL from the mixture", got=mixture, expected=dense.mixture, atol=0 if case.equal else step)
    kernels.write_gradient(
        logits,
        PolicyTerm(
            inverse_temperature=scale,
            labels=local,
            lse=lse,
            grad_logprobs=by_logprobs,
            a=by_logprobs + by_entropy * dense.entropy.to(device, wide),
            b=by_entropy if case.with_entropy else None,
        ),
        DivergenceTerm(
            divergence=case.divergence,
            beta=case.beta,
            others=others,
            inverse_temperature=teacher_scale,
            lse=lse,
            teacher_lse=teacher_lse,
            mean=torch.zeros_like(mean) if case.equal else mean,
            weight=weight,
        ),
    )
    largest = max(float(dense.gradient.abs().max()), float((weights[2] * scales[0]).abs().max()))
    yield KernelCheck(
        name="gradient",
        got=logits,
        expected=torch.zeros_like(dense.gradient) if case.equal else dense.gradient,
        atol=0 if case.equal else largest * step,
        rtol=torch.finfo(dtype).eps,
    )
