"""The head beside an engine's recorded head, on one rank, against the definition on dense float64 distributions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.parallel.head.distill import vocab_parallel_divergence
from megarl.parallel.head.given_teachers import TeacherLogits
from megarl.parallel.head.logprobs import HeadOptions
from megarl.parallel.head.memory_mode import HeadMemoryMode
from megarl.parallel.head.statistics import vocab_shard
from tests.helpers.compare import assert_within
from tests.helpers.head import nucleus_problem
from tests.helpers.head_ranks import ONE_RANK, REGIMES
from tests.helpers.recorded_heads import RecordedCase, WholeCase
from tests.helpers.teacher_heads import taught_problem

RULES = [("none", 0.0, 2.0), ("tis", 0.0, 2.0), ("tis", 0.7, 1.5), ("mis", 0.5, 5.0), ("mis", 0.0, 1.2)]


def assert_recorded(case: RecordedCase, *, atol: float = 1e-12) -> None:
    got, expected = case.solve()[0], case.expected
    for name in expected.values:
        assert_within(name, got.values[name], expected.values[name], atol=atol)
    assert_within("hidden", got.grad_hidden, expected.grad_hidden, atol=atol)
    size = case.problem.student.vocab_size
    assert not got.grad_weight[size:].any()
    assert_within("weight", got.grad_weight[:size], expected.grad_weight, atol=atol)


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize(("weight", "low", "high"), RULES)
def test_against_dense(weight: str, low: float, high: float, memory_mode: str) -> None:
    for problem in (
        taught_problem(top_k=4, gap=True),
        taught_problem(top_k=11),
        taught_problem(top_k=4, student=nucleus_problem()),
        taught_problem(top_k=1, num_rows=1),
        taught_problem(top_k=3, num_rows=0),
    ):
        rule = {"weight": weight, "low": low, "high": high}
        assert_recorded(RecordedCase(problem=problem, memory_mode=memory_mode, **rule))


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize(("weight", "low", "high"), [*RULES, ("tv", 0.0, 0.0), ("kl", 0.0, 0.0)])
def test_beside_a_whole_distribution(weight: str, low: float, high: float, memory_mode: str) -> None:
    capped = taught_problem()
    for problem in (
        taught_problem(),
        replace(capped, student=replace(capped.student, logit_cap=2.0, grad_entropy=None)),
        taught_problem(num_rows=0),
    ):
        assert_recorded(WholeCase(problem=problem, weight=weight, low=low, high=high, memory_mode=memory_mode))


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize("weight", ["tis", "tv"])
def test_tokens_of_several_versions(weight: str, memory_mode: str) -> None:
    capped = taught_problem()
    for problem in (capped, replace(capped, student=replace(capped.student, logit_cap=2.0, grad_entropy=None))):
        for which in ((4, -1, 0, -1, 4, -1, 4), (0, 0, 4, 4, 4, -1, -1), (4,) * 7):
            assert_recorded(WholeCase(problem=problem, weight=weight, memory_mode=memory_mode, which=which))


def test_a_chunk_is_multiplied_by_few_versions_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tokens in chunks of four, three versions by turns: a product per chunk, in forward and in backward."""
    multiplied, products, problem = torch.mm, list[int](), taught_problem(num_rows=12)

    def mm(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        # The teacher's states are of another width than the student's.
        if a.shape[1] == problem.teacher_hidden.shape[1]:
            products.append(len(a))
        return multiplied(a, b, **options)

    monkeypatch.setattr(torch, "mm", mm)
    for which in ((-1, 0, 4) * 4, (4,) * 12):
        WholeCase(problem=problem, chunk_tokens=4, which=which).solve()
        assert products == [4] * 6
        products.clear()


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_one_version_is_computed_as_no_versions_are(memory_mode: str) -> None:
    case = WholeCase(problem=taught_problem().to(torch.float32), memory_mode=memory_mode)
    expected, got = case.solve()[0], replace(case, which=(-1,) * 7).solve()[0]
    assert all(torch.equal(got.values[name], value) for name, value in expected.values.items())
    assert torch.equal(got.grad_hidden, expected.grad_hidden)
    assert torch.equal(got.grad_weight, expected.grad_weight)


def test_a_part_of_a_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="not against a part of it"):
        WholeCase(problem=taught_problem(student=nucleus_problem())).solve()


def test_capped_logits_and_no_entropy() -> None:
    problem = taught_problem(top_k=4)
    student = replace(problem.student, logit_cap=2.0, grad_entropy=None)
    assert_recorded(RecordedCase(problem=replace(problem, student=student), weight="tis"))


def test_a_row_of_several_versions_is_named_as_it_was_given() -> None:
    """Which tokens have the wrong gradient is said in the caller's order, not in that of versions."""
    shard = vocab_shard(ONE_RANK, 9, 9)
    hidden, weight = torch.randn(6, 4, dtype=torch.float64).requires_grad_(), torch.randn(9, 4, dtype=torch.float64)
    which = torch.tensor([4, -1, 4, -1, 4, -1])
    teacher = TeacherLogits(hidden=hidden.detach(), weight=weight, shard=shard, others={4: weight}, which=which)
    ones = torch.ones(6, dtype=torch.float64)
    options = HeadOptions(memory_mode=HeadMemoryMode.IN_CHUNK, loss_gradients=lambda *_: (ones, None, None))
    labels = torch.zeros(6, dtype=torch.int64)
    found = vocab_parallel_divergence(hidden, weight, labels, shard=shard, teacher=teacher, options=options)
    with pytest.raises(ValueError, match=r"log-probs of kept row 3 is 5.0, but was 1.0"):
        (found.logprobs * torch.tensor([1, 1, 1, 5, 1, 1])).sum().backward()
