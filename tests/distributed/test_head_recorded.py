"""The head beside an engine's recorded head on vocabulary shards: values, gradients, and what ranks exchange."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.helpers import recorded_heads
from tests.helpers.compare import assert_within
from tests.helpers.head import nucleus_problem
from tests.helpers.head_ranks import REGIMES, Collective
from tests.helpers.rank_pool import RankPool
from tests.helpers.recorded_heads import COMPARED, RecordedCase, WholeCase
from tests.helpers.teacher_heads import TEACHER_TEMPERATURE, TaughtProblem, TaughtResult, taught_problem

GetPool = Callable[[int], RankPool]
# In order of versions, chunks of three tokens have those of one rank, of both, and of two versions.
MIXED = (4, -1, 0, -1, 4, -1, 4)


def whole(results: list[TaughtResult], *, is_split: bool, vocab_size: int) -> TaughtResult:
    """All ranks' parts of the gradients; their values must be equal."""
    for result in results:
        assert all(torch.equal(result.values[name], results[0].values[name]) for name in COMPARED)
    hidden = [result.grad_hidden for result in results]
    grad_weight = torch.cat([result.grad_weight for result in results])
    assert not grad_weight[vocab_size:].any()
    return TaughtResult(
        values={name: results[0].values[name] for name in COMPARED},
        grad_hidden=torch.cat(hidden) if is_split else hidden[0],
        grad_weight=grad_weight[:vocab_size],
    )


def assert_same(got: TaughtResult, expected: TaughtResult, error: float) -> None:
    """The error is relative to a tensor's largest element, or absolute below 1."""
    pairs = [(name, got.values[name], expected.values[name]) for name in COMPARED]
    pairs += [("hidden", got.grad_hidden, expected.grad_hidden), ("weight", got.grad_weight, expected.grad_weight)]
    for name, ours, theirs in pairs:
        assert_within(name, ours, theirs.to(ours.dtype), atol=error * max(1.0, float(theirs.abs().max())))


def near(problem: TaughtProblem) -> TaughtProblem:
    """The engine is about as the policy; where they are far apart, κ amplifies what rounding does."""
    student = replace(problem.student, temperature=torch.full((7,), TEACHER_TEMPERATURE))
    return replace(problem, student=student, teacher_hidden=0.95 * student.hidden, teacher_weight=student.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_two_ranks(rank_pool: GetPool, dtype: torch.dtype) -> None:
    """Uneven shards, one of padding alone, and hidden states in parts, as sequence parallelism has them; in float32
    beside one rank."""
    problems = [
        taught_problem(top_k=4, gap=True),
        taught_problem(top_k=4, student=nucleus_problem()),
        taught_problem(top_k=11),
    ]
    if dtype is torch.float32:
        problems = [near(problem) for problem in problems]
    rules = [("none", 0.0, 2.0), ("tis", 0.5, 2.0), ("mis", 0.5, 5.0)]
    cases = [
        RecordedCase(
            problem=problem.to(dtype),
            rows_per_rank=rows,
            row_counts=counts,
            memory_mode=REGIMES[i % 3],
            weight=weight,
            low=low,
            high=high,
        )
        for i, problem in enumerate(problems)
        for weight, low, high in rules
        for rows, counts in ((8, None), (16, (4, 3)))
    ]
    cases += [
        WholeCase(
            problem=taught_problem().to(dtype) if dtype is torch.float64 else near(taught_problem()).to(dtype),
            rows_per_rank=rows,
            row_counts=counts,
            memory_mode=mode,
            weight=weight,
        )
        for weight, mode in zip(("none", "tis", "mis", "tv", "kl"), REGIMES * 2, strict=False)
        for rows, counts in ((8, None), (16, (4, 3)))
    ]
    cases += [replace(case, which=MIXED) for case in cases if isinstance(case, WholeCase)]
    by_rank = rank_pool(2).run(recorded_heads.recorded_heads, cases)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        results, vocab_size = [result for result, _ in ranks], case.problem.student.vocab_size
        got = whole(results, is_split=case.row_counts is not None, vocab_size=vocab_size)
        if dtype is torch.float64:
            assert_same(got, case.expected, 1e-12)
        else:
            alone = replace(case, rows_per_rank=16, row_counts=None, memory_mode="recompute").solve()[0]
            assert_same(got, whole([alone], is_split=False, vocab_size=vocab_size), 1e-6)
    ((_, seen),) = [ranks[0] for ranks in zip(*by_rank, strict=True)][:1]
    # Three floats per token, the rest's lse, and z of four tokens.
    size = (3 + 1 + 4) * 7
    if dtype is torch.float32:
        assert seen == [Collective(name="_allgather_base_", num_elements=size, num_bytes=4 * size)]
