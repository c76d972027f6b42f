"""The head with a teacher on vocabulary shards: values, gradients, and what ranks exchange."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from megarl.parallel.head.divergence import Divergence
from tests.helpers import teacher_heads
from tests.helpers.compare import assert_within
from tests.helpers.head import nucleus_problem
from tests.helpers.head_ranks import REGIMES, Collective
from tests.helpers.rank_pool import RankPool
from tests.helpers.teacher_heads import TaughtCase, TaughtProblem, dense_taught, taught_problem

GetPool = Callable[[int], RankPool]


def assert_taught(pool: RankPool, cases: Sequence[TaughtCase], *, atol: float = 1e-12) -> list[list[list[Collective]]]:
    """Each case against dense distributions; returns each case's collectives of every rank."""
    by_rank = pool.run(teacher_heads.taught_heads, cases)
    found = []
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        results = [result for result, _ in ranks]
        expected, vocab_size = dense_taught(case.problem), case.problem.student.vocab_size
        print(case.problem.divergence, case.memory_mode, case.problem.common, case.problem.top_k, case.row_counts)
        for name, value in expected.values.items():
            assert all(torch.equal(result.values[name], results[0].values[name]) for result in results)
            assert_within(name, results[0].values[name], value, atol=atol)
        hidden = [result.grad_hidden for result in results]
        assert_within(
            "hidden", hidden[0] if case.row_counts is None else torch.cat(hidden), expected.grad_hidden, atol=atol
        )
        grad_weight = torch.cat([result.grad_weight for result in results])
        assert not grad_weight[vocab_size:].any()
        assert_within("weight", grad_weight[:vocab_size], expected.grad_weight, atol=atol)
        found.append([seen for _, seen in ranks])
    return found


def spread(problem: TaughtProblem, memory_mode: str) -> list[TaughtCase]:
    """A problem of 11 tokens over two ranks: uneven shards, one of padding alone, and hidden states in parts."""
    return [
        TaughtCase(problem=problem, rows_per_rank=8, memory_mode=memory_mode),
        TaughtCase(problem=problem, rows_per_rank=16, memory_mode=memory_mode, row_counts=(4, 3)),
    ]


def test_every_divergence_and_memory_mode(rank_pool: GetPool) -> None:
    problems = [taught_problem(divergence=kind) for kind in Divergence]
    assert_taught(rank_pool(2), [case for p in problems for memory_mode in REGIMES for case in spread(p, memory_mode)])


@pytest.mark.long
@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize("kind", list(Divergence))
def test_four_ranks_other_shapes_and_float32(rank_pool: GetPool, kind: Divergence, memory_mode: str) -> None:
    problem = taught_problem(divergence=kind)
    cases = [
        TaughtCase(problem=problem, rows_per_rank=4, memory_mode=memory_mode, row_counts=counts)
        for counts in (None, (2, 0, 4, 1), (0, 0, 0, 7))
    ]
    assert_taught(rank_pool(4), cases)
    nucleus = taught_problem(divergence=kind, student=nucleus_problem())
    cases = [*spread(nucleus, memory_mode), *spread(taught_problem(num_rows=1, divergence=kind), memory_mode)[:1]]
    cases += [TaughtCase(problem=taught_problem(num_rows=0, divergence=kind), rows_per_rank=8, memory_mode=memory_mode)]
    assert_taught(rank_pool(2), cases)
    assert_taught(rank_pool(2), spread(problem.to(torch.float32), memory_mode), atol=2e-5)


def test_the_likeliest_tokens(rank_pool: GetPool) -> None:
    problems = [taught_problem(divergence=kind, top_k=k, gap=k == 4) for kind in Divergence for k in (4, 11)]
    cases = [case for problem in problems for case in spread(problem, REGIMES[len(problem.divergence) % 3])]
    assert_taught(rank_pool(2), cases)


# (student's and teacher's vocabulary, tokens in common, rows per rank of both)
SPLITS = [(11, 15, 11, 6, 8), (11, 8, 8, 6, 4), (11, 11, 9, 6, 6), (11, 11, None, 8, 6), (11, 20, 11, 12, 10)]


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_vocabularies_of_other_sizes_and_splits(rank_pool: GetPool, memory_mode: str) -> None:
    """The teacher's weight is split anew as the student's, and tokens beyond the common part are left out."""
    cases = [
        TaughtCase(
            problem=taught_problem(
                vocab_size=size,
                teacher_vocab=teacher_vocab,
                common=common,
                divergence=list(Divergence)[i % 3],
                top_k=top_k,
            ),
            rows_per_rank=rows,
            teacher_rows=teacher_rows,
            memory_mode=memory_mode,
        )
        for i, (size, teacher_vocab, common, rows, teacher_rows) in enumerate(SPLITS)
        for top_k in (None, 3)
    ]
    assert_taught(rank_pool(2), cases)


def test_a_student_is_not_taught_by_itself(rank_pool: GetPool) -> None:
    """Not by the least number, nor is the gradient other than without a teacher."""
    cases = []
    for kind in Divergence:
        problem = taught_problem(divergence=kind).to(torch.float32)
        student = replace(
            problem.student,
            temperature=torch.full((7,), teacher_heads.TEACHER_TEMPERATURE),
            grad_logprobs=torch.zeros(7),
            grad_entropy=None,
        )
        itself = replace(problem, student=student, teacher_hidden=student.hidden, teacher_weight=student.weight)
        cases += [TaughtCase(problem=itself, rows_per_rank=8, memory_mode=memory_mode) for memory_mode in REGIMES]
    for results in rank_pool(2).run(teacher_heads.taught_heads, cases):
        for result, _ in results:
            for name in ("divergence", "reverse_kl", "forward_kl"):
                assert not result.values[name].any()
            assert not result.grad_hidden.any()
            assert not result.grad_weight.any()


def test_what_is_exchanged(rank_pool: GetPool) -> None:
    """One all-gather of ten floats per token, twelve for a common part; by chunk for JSD, with an all-reduce of two."""
    kinds = (Divergence.REVERSE, Divergence.FORWARD)
    problems = [taught_problem(divergence=kind) for kind in kinds]
    problems += [taught_problem(common=9), taught_problem(top_k=5)]
    cases = [
        TaughtCase(problem=problem.to(torch.float32), rows_per_rank=8, memory_mode=memory_mode)
        for problem in problems
        for memory_mode in ("recompute", "keep")
    ]
    floats = [10, 10, 10, 10, 12, 12, 9, 9]
    jsd = taught_problem(divergence=Divergence.JSD).to(torch.float32)
    cases.append(TaughtCase(problem=jsd, rows_per_rank=8))
    *once, by_chunk = assert_taught(rank_pool(2), cases, atol=3e-5)
    for count, ranks in zip(floats, once, strict=True):
        gather = Collective(name="_allgather_base_", num_elements=count * 7, num_bytes=4 * count * 7)
        assert ranks == [[gather], [gather]]
    for seen in by_chunk:
        assert [(each.name, each.num_elements) for each in seen] == [
            pair for n in (3, 3, 1) for pair in (("_allgather_base_", 10 * n), ("allreduce_", 2 * n))
        ]
