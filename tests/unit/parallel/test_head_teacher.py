"""The head with a teacher on one rank: values and gradients against dense float64 distributions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.parallel.head.distill import vocab_parallel_divergence
from megarl.parallel.head.divergence import Divergence
from megarl.parallel.head.given_teachers import TeacherLogits, TopLogits
from megarl.parallel.head.kernels import PolicyTerm
from megarl.parallel.head.logprobs import HeadOptions, vocab_parallel_logprobs
from megarl.parallel.head.statistics import vocab_shard
from megarl.parallel.head.teacher_kernels import DivergenceTerm, LogitPair, TorchTeacherKernels
from megarl.parallel.head.teacher_self_test import teacher_self_test
from tests.helpers.compare import assert_within
from tests.helpers.head import head_problem, nucleus_problem
from tests.helpers.head_ranks import ONE_RANK, REGIMES
from tests.helpers.teacher_heads import (
    TaughtCase,
    TaughtProblem,
    dense_taught,
    taught_problem,
)

KINDS = list(Divergence)


def assert_taught(case: TaughtCase, *, atol: float = 1e-12) -> None:
    got, _ = case.solve()
    expected, vocab_size = dense_taught(case.problem), case.problem.student.vocab_size
    assert not got.grad_weight[vocab_size:].any()
    for name, value in expected.values.items():
        assert_within(name, got.values[name], value, atol=atol)
    assert_within("hidden", got.grad_hidden, expected.grad_hidden, atol=atol)
    assert_within("weight", got.grad_weight[:vocab_size], expected.grad_weight, atol=atol)


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_values_and_gradients(dtype: torch.dtype, atol: float, kind: Divergence, memory_mode: str) -> None:
    for with_entropy, num_rows in ((True, 7), (False, 7), (True, 0), (True, 1)):
        student = head_problem(num_rows=num_rows, with_entropy=with_entropy)
        problem = taught_problem(num_rows=num_rows, student=student, divergence=kind)
        assert_taught(TaughtCase(problem=problem.to(dtype), memory_mode=memory_mode), atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_what_students_have_beside(kind: Divergence) -> None:
    """Capped logits, and labels that were sampled from a few tokens."""
    for student in (replace(head_problem(), logit_cap=5.0), nucleus_problem()):
        for memory_mode in REGIMES:
            assert_taught(TaughtCase(problem=taught_problem(student=student, divergence=kind), memory_mode=memory_mode))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab_size", "teacher_vocab", "common"), [(11, 15, 11), (11, 8, 8), (11, 11, 6)])
def test_vocabularies_with_a_common_part(kind: Divergence, vocab_size: int, teacher_vocab: int, common: int) -> None:
    """Of the whole distribution, of its likeliest tokens, and of all of these, which are the whole one."""
    for top_k in (None, 3, common):
        problem = taught_problem(
            vocab_size=vocab_size, teacher_vocab=teacher_vocab, common=common, divergence=kind, top_k=top_k
        )
        for memory_mode in REGIMES:
            assert_taught(TaughtCase(problem=problem, memory_mode=memory_mode))


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("top_k", "gap"), [(1, False), (4, True), (11, False)])
def test_the_likeliest_tokens_and_one_outcome_for_the_rest(
    top_k: int, gap: bool, kind: Divergence, memory_mode: str
) -> None:
    problem = taught_problem(top_k=top_k, gap=gap, divergence=kind)
    assert_taught(TaughtCase(problem=problem, memory_mode=memory_mode))
    assert_taught(TaughtCase(problem=problem.to(torch.float32), memory_mode=memory_mode), atol=3e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_are_exact_and_fewer_a_lower_bound(kind: Divergence) -> None:
    exact, _ = TaughtCase(problem=taught_problem(divergence=kind)).solve()
    values = []
    for top_k in (11, 4, 1):
        got, _ = TaughtCase(problem=taught_problem(divergence=kind, top_k=top_k)).solve()
        values.append(got.values["divergence"])
        if top_k == 11:
            assert_within("hidden", got.grad_hidden, exact.grad_hidden, atol=1e-12)
            assert_within("weight", got.grad_weight, exact.grad_weight, atol=1e-12)
    assert_within("k = V", values[0], exact.values["divergence"], atol=1e-12)
    assert (values[1] < values[0]).all()
    assert (values[2] < values[1]).all()


def only_divergence(problem: TaughtProblem, dtype: torch.dtype, *, itself: bool = False) -> tuple[torch.Tensor, ...]:
    """Σ g_D·D alone: the divergences, and the gradients of hidden states and weight."""
    student = problem.student.to(dtype)
    hidden, weight = student.hidden.clone().requires_grad_(), student.weight.clone().requires_grad_()
    shard = vocab_shard(ONE_RANK, 11, 11)
    teacher = TeacherLogits(
        hidden=problem.teacher_hidden.to(dtype), weight=problem.teacher_weight.to(dtype), shard=shard
    )
    if itself:
        teacher = replace(teacher, hidden=student.hidden, weight=student.weight, temperature=student.temperature)
    out = vocab_parallel_divergence(
        hidden,
        weight,
        student.labels,
        shard=shard,
        teacher=teacher,
        divergence=problem.divergence,
        options=HeadOptions(temperature=student.temperature, chunk_tokens=3),
    )
    return out.divergence.detach(), *torch.autograd.grad(
        (out.divergence * problem.grad_divergence).sum(), (hidden, weight)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_sums_to_zero_over_the_vocabulary(kind: Divergence) -> None:
    """That of the weight is Σ gᵢᵥ hᵢ, so that its sum over v is 0."""
    _, _, grad_weight = only_divergence(taught_problem(divergence=kind), torch.float64)
    assert grad_weight.abs().max() > 0.1
    assert_within("sum", grad_weight.sum(0), torch.zeros(6), atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_is_not_taught_by_itself(kind: Divergence, dtype: torch.dtype) -> None:
    for found in only_divergence(taught_problem(divergence=kind), dtype, itself=True):
        assert not found.any()


def test_the_mean_of_sampled_gradients_is_the_exact_one() -> None:
    """E over y ~ p of (log p(y) − log q(y)) ∂log p(y) = ∂KL(p‖q), by all 20 tokens of a vocabulary."""
    vocab_size = 20
    problem = taught_problem(num_rows=1, vocab_size=vocab_size, teacher_vocab=vocab_size)
    student, shard = problem.student, vocab_shard(ONE_RANK, vocab_size, vocab_size)
    hidden, weight = student.hidden.clone().requires_grad_(), student.weight.clone().requires_grad_()
    teacher = TeacherLogits(hidden=problem.teacher_hidden, weight=problem.teacher_weight, shard=shard)
    exact = vocab_parallel_divergence(hidden, weight, student.labels, shard=shard, teacher=teacher).divergence.sum()
    expected = torch.autograd.grad(exact, (hidden, weight))

    each = vocab_parallel_logprobs(
        hidden.expand(vocab_size, -1), weight, torch.arange(vocab_size), shard=shard
    ).logprobs
    log_p = each.detach()
    log_q = (problem.teacher_hidden @ problem.teacher_weight.t()).log_softmax(-1)[0]
    sampled = torch.autograd.grad((log_p.exp() * (log_p - log_q) * each).sum(), (hidden, weight))
    for name, got, wanted in zip(("hidden", "weight"), sampled, expected, strict=True):
        assert_within(name, got, wanted, atol=1e-13)


def test_without_gradients_nothing_is_kept() -> None:
    case = TaughtCase(problem=taught_problem(divergence=Divergence.JSD))
    with torch.no_grad():
        student, shard = case.problem.student, vocab_shard(ONE_RANK, 11, 11)
        arguments = (case.problem.teacher_hidden, case.problem.teacher_weight, shard)
        out = case.forward(student.hidden, student.weight, shard, *arguments)
    assert not out.divergence.requires_grad
    assert_within("JSD", out.divergence, dense_taught(case.problem).values["divergence"], atol=1e-12)


def test_what_is_refused() -> None:
    problem = taught_problem()
    student, shard = problem.student, vocab_shard(ONE_RANK, 11, 11)
    teacher = TeacherLogits(hidden=problem.teacher_hidden, weight=problem.teacher_weight, shard=shard)
    refusals = [
        (replace(teacher, hidden=problem.teacher_hidden[1:]), "the teacher has 6 hidden states, expected 7"),
        (replace(teacher, shard=replace(shard, start=4)), "start at token 4, the student's at 0; call resplit_weight"),
        (
            replace(teacher, shard=replace(shard, size=9)),
            "11 tokens of the student's vocabulary and 9 of the teacher's",
        ),
        (
            replace(teacher, shard=replace(shard, size=9), common=10),
            "this rank's 9 of the teacher's from 0 on end before",
        ),
        (TopLogits(logprobs=torch.zeros(7, 2), ids=torch.zeros(7, 3)), r"shape \(7, 2\) and ids \(7, 3\), expected"),
    ]
    for wrong, message in refusals:
        with pytest.raises(ValueError, match=message):
            vocab_parallel_divergence(student.hidden, student.weight, student.labels, shard=shard, teacher=wrong)
    with pytest.raises(ValueError, match=r"beta is 1\.0, expected a number between 0 and 1"):
        vocab_parallel_divergence(
            student.hidden,
            student.weight,
            student.labels,
            shard=shard,
            teacher=teacher,
            divergence=Divergence.JSD,
            beta=1.0,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_self_test_passes_of_right_kernels(dtype: torch.dtype) -> None:
    assert teacher_self_test(TorchTeacherKernels(), torch.device("cpu"), dtype) is None


class ForgetsTheTeachersTemperature(TorchTeacherKernels):
    def statistics(self, pair: LogitPair, labels: Tensor, out: Tensor) -> None:
        super().statistics(pair._replace(teacher_inverse_temperature=pair.inverse_temperature), labels, out)


class SwapsTheModels(TorchTeacherKernels):
    def mixture(self, pair: LogitPair, *, out: Tensor, **rest: Any) -> None:
        super().mixture(pair, out=out, **rest)
        out.copy_(out.flip(0))


class ForgetsTheMean(TorchTeacherKernels):
    def write_gradient(self, logits: Tensor, term: PolicyTerm, beside: DivergenceTerm) -> None:
        super().write_gradient(logits, term, replace(beside, mean=torch.zeros_like(beside.mean)))


class RoundsTwice(TorchTeacherKernels):
    """So that a student is taught by itself."""

    def write_gradient(self, logits: Tensor, term: PolicyTerm, beside: DivergenceTerm) -> None:
        super().write_gradient(logits, term, replace(beside, teacher_lse=beside.teacher_lse + 1e-6))


WRONG = {
    ForgetsTheTeachersTemperature: "lse differs by ",
    SwapsTheModels: "KL from the mixture differs by ",
    ForgetsTheMean: "gradient differs by ",
    RoundsTwice: "gradient differs by ",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_self_test_finds_what_is_wrong(wrong: type[TorchTeacherKernels]) -> None:
    fault = teacher_self_test(wrong(), torch.device("cpu"), torch.float32)
    assert fault is not None
    assert f" in torch.float32: {WRONG[wrong]}" in fault
