"""The log-prob head's regimes on vocabulary shards, with and without sequence parallelism, and what they exchange."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from tests.helpers import head_ranks
from tests.helpers.compare import assert_within
from tests.helpers.head import HeadProblem, HeadResult, dense_head, head_problem, nucleus_problem
from tests.helpers.head_ranks import REGIMES, Collective, HeadCase, HeadCollectives, dense_token_loss
from tests.helpers.rank_pool import RankPool

GetPool = Callable[[int], RankPool]


def run_heads(pool: RankPool, cases: Sequence[HeadCase]) -> list[HeadResult]:
    """Each case's results in one: equal values, gradients of hidden states and of weight from all ranks."""
    by_rank = pool.run(head_ranks.heads, cases)
    return [joined(case, results) for case, results in zip(cases, zip(*by_rank, strict=True), strict=True)]


def joined(case: HeadCase, results: Sequence[HeadResult]) -> HeadResult:
    first = results[0]
    for other in results[1:]:
        assert torch.equal(first.logprobs, other.logprobs)
        assert torch.equal(first.entropy, other.entropy)
    if case.row_counts is None:
        assert all(torch.equal(first.grad_hidden, other.grad_hidden) for other in results)
        grad_hidden = first.grad_hidden
    else:
        assert tuple(len(result.grad_hidden) for result in results) == case.row_counts
        grad_hidden = torch.cat([result.grad_hidden for result in results])
    grad_weight = torch.cat([result.grad_weight for result in results])
    assert not grad_weight[case.problem.vocab_size :].any()
    return replace(first, grad_hidden=grad_hidden, grad_weight=grad_weight[: case.problem.vocab_size])


def assert_exact(pool: RankPool, cases: Sequence[HeadCase], *, atol: float = 1e-12) -> None:
    for case, got in zip(cases, run_heads(pool, cases), strict=True):
        expected = dense_token_loss(case.problem)
        print(f"{case.memory_mode}, {len(case.problem.labels)} rows: {case.row_counts}")
        for name in ("logprobs", "entropy", "grad_hidden", "grad_weight"):
            assert_within(name, getattr(got, name), getattr(expected, name), atol=atol)


# Numbers of ranks, and how many rows of the padded vocabulary of 11 each has: the last may have
# none of it.
RANKS = [(2, 8), (2, 16), (4, 4)]
# Seven rows in chunks of three: chunks end within a rank's rows, and ranks' rows within a chunk.
ROW_COUNTS = {2: [None, (4, 3), (1, 6), (0, 7), (7, 0)], 4: [None, (2, 0, 4, 1), (0, 0, 0, 7)]}


@pytest.mark.parametrize("rows_per_rank", [8, 16])
def test_squares(rank_pool: GetPool, rows_per_rank: int) -> None:
    for problem in (head_problem(), nucleus_problem()):
        for logprobs, squares in rank_pool(2).run(
            head_ranks.squares, HeadCase(problem=problem, rows_per_rank=rows_per_rank)
        ):
            assert_within("squares", squares, head_ranks.dense_squares(problem), atol=1e-12)
            assert_within("log-probs", logprobs, dense_head(problem).logprobs, atol=1e-12)


@pytest.mark.parametrize("memory_mode", REGIMES)
@pytest.mark.parametrize(("num_ranks", "rows_per_rank"), RANKS)
def test_values_and_gradients(rank_pool: GetPool, num_ranks: int, rows_per_rank: int, memory_mode: str) -> None:
    cases = [
        HeadCase(
            problem=head_problem(with_entropy=with_entropy),
            rows_per_rank=rows_per_rank,
            memory_mode=memory_mode,
            chunk_tokens=chunk_tokens,
            row_counts=row_counts,
        )
        for row_counts in ROW_COUNTS[num_ranks]
        for chunk_tokens, with_entropy in ((3, True), (1, False), (None, True))
    ]
    assert_exact(rank_pool(num_ranks), cases)


def test_nuclei_across_shards(rank_pool: GetPool) -> None:
    """Labels that were sampled from a few tokens of either shard or of both; a shard may be padding alone."""
    cases = [
        HeadCase(
            problem=nucleus_problem(with_entropy=with_entropy),
            rows_per_rank=rows_per_rank,
            memory_mode=memory_mode,
            row_counts=row_counts,
        )
        for memory_mode in REGIMES
        for rows_per_rank, row_counts, with_entropy in ((8, None, True), (8, (4, 3), False), (16, (0, 7), True))
    ]
    assert_exact(rank_pool(2), cases)


def random_case(seed: int) -> HeadCase:
    """Any shape on two ranks, rows spread in any way."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_rows, vocab_size, hidden_size, first = integer(0, 12), integer(1, 40), integer(1, 12), integer(0, 12)
    first = min(first, num_rows)
    problem = HeadProblem(
        hidden=randn(num_rows, hidden_size),
        weight=randn(vocab_size, hidden_size),
        labels=torch.randint(0, vocab_size, (num_rows,), generator=generator),
        temperature=torch.rand(num_rows, generator=generator, dtype=torch.float64) * 3 + 0.25,
        grad_logprobs=randn(num_rows),
        grad_entropy=randn(num_rows) if integer(0, 1) else None,
    )
    return HeadCase(
        problem=problem,
        rows_per_rank=-(-vocab_size // 2) + integer(0, 3),
        memory_mode=REGIMES[integer(0, 2)],
        chunk_tokens=integer(1, 13),
        row_counts=(first, num_rows - first) if integer(0, 2) else None,
    )


def test_any_shape(rank_pool: GetPool) -> None:
    # Logits of up to ~50, over a temperature of ¼, and as large factors in the gradients.
    assert_exact(rank_pool(2), [random_case(seed) for seed in range(40)], atol=1e-10)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_few_rows(rank_pool: GetPool, memory_mode: str) -> None:
    cases = [
        HeadCase(
            problem=head_problem(num_rows=num_rows), rows_per_rank=8, memory_mode=memory_mode, row_counts=row_counts
        )
        for num_rows, counts in ((0, [None, (0, 0)]), (1, [None, (1, 0), (0, 1)]))
        for row_counts in counts
    ]
    assert_exact(rank_pool(2), cases)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_float32(rank_pool: GetPool, memory_mode: str) -> None:
    cases = [
        HeadCase(
            problem=head_problem(dtype=torch.float32), rows_per_rank=8, memory_mode=memory_mode, row_counts=row_counts
        )
        for row_counts in (None, (1, 6))
    ]
    assert_exact(rank_pool(2), cases, atol=1e-5)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_all_logits_very_negative(rank_pool: GetPool, memory_mode: str) -> None:
    problem = head_problem()
    problem.hidden[:, 0] = 1e3
    problem.weight[:, 0] = -100.0
    cases = [
        HeadCase(problem=problem, rows_per_rank=8, memory_mode=memory_mode, row_counts=row_counts)
        for row_counts in (None, (5, 2))
    ]
    # Logits of 2e5 have float64 steps of 3e-11, and gradients multiply their errors by up to 1e3.
    assert_exact(rank_pool(2), cases, atol=1e-7)


@pytest.mark.parametrize("memory_mode", REGIMES)
def test_bfloat16_inputs_keep_float32_statistics(rank_pool: GetPool, memory_mode: str) -> None:
    """Statistics are those of bfloat16 logits to float32; gradients are partial sums of bfloat16, added up in it."""
    problem = replace(head_problem(num_rows=12, vocab_size=2000, dtype=torch.bfloat16), temperature=torch.ones(12))
    log_p = (problem.hidden @ problem.weight.t()).double().log_softmax(-1)
    expected = dense_token_loss(problem)
    for row_counts in (None, (3, 9)):
        case = HeadCase(
            problem=problem, rows_per_rank=1024, memory_mode=memory_mode, chunk_tokens=5, row_counts=row_counts
        )
        (got,) = run_heads(rank_pool(2), [case])
        assert got.logprobs.dtype == got.entropy.dtype == torch.float32
        assert got.grad_hidden.dtype == got.grad_weight.dtype == torch.bfloat16
        assert_within("log-probs", got.logprobs, log_p.gather(1, problem.labels[:, None])[:, 0], atol=1e-5)
        assert_within("entropy", got.entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5)
        for name in ("grad_hidden", "grad_weight"):
            exact = getattr(expected, name)
            scale = exact.abs().max()
            # Logits of up to 16 are rounded by up to 2⁻⁵, and so p by 3 %.
            assert_within(name, getattr(got, name).double() / scale, exact / scale, atol=2**-5)


def all_gather(rows: int) -> Collective:
    return Collective(name="_allgather_base_", num_elements=3 * rows, num_bytes=12 * rows)


def collectives(name: str, *rows: int, hidden_size: int = 6) -> list[Collective]:
    return [Collective(name=name, num_elements=n * hidden_size, num_bytes=4 * n * hidden_size) for n in rows]


def exchanged(
    rank_pool: GetPool, memory_mode: str, row_counts: tuple[int, ...] | None = None, *, num_ranks: int = 2
) -> HeadCollectives:
    """Of seven float32 rows in chunks of three; all ranks exchange the same."""
    case = HeadCase(
        problem=head_problem(dtype=torch.float32),
        rows_per_rank=16 // num_ranks,
        memory_mode=memory_mode,
        row_counts=row_counts,
    )
    seen = rank_pool(num_ranks).run(head_ranks.head_collectives, case, 4)
    assert all(other == seen[0] for other in seen)
    found: HeadCollectives = seen[0]
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("memory_mode", ["recompute", "keep"])
def test_one_all_gather_of_three_floats_a_row(rank_pool: GetPool, memory_mode: str, num_ranks: int) -> None:
    found = exchanged(rank_pool, memory_mode, num_ranks=num_ranks)
    assert found.without_graph == [all_gather(7)]
    assert found.forward == [all_gather(7)]
    assert found.backward == collectives("allreduce_", 3, 3, 1)
    # Four log-probs and four ids more, in the same all-gather.
    top = Collective(name="_allgather_base_", num_elements=(3 + 8) * 7, num_bytes=4 * (3 + 8) * 7)
    assert found.top == [top]


def test_one_all_gather_a_chunk_of_a_loss_in_its_chunks(rank_pool: GetPool) -> None:
    found = exchanged(rank_pool, "in_chunk")
    assert found.without_graph == [all_gather(7)]
    by_chunk = [[all_gather(rows), *collectives("allreduce_", rows)] for rows in (3, 3, 1)]
    assert found.forward == [one for chunk in by_chunk for one in chunk]
    assert found.backward == []


@pytest.mark.parametrize("memory_mode", ["recompute", "keep"])
@pytest.mark.parametrize(
    ("row_counts", "gathered", "reduced"),
    [((4, 3), [4, 3], [3, 1, 2, 1]), ((0, 7), [7], [3, 3, 1]), ((7, 0), [7], [3, 3, 1])],
)
def test_sequence_parallelism_adds_a_gather_of_kept_rows_and_its_reduction(
    rank_pool: GetPool, row_counts: tuple[int, int], gathered: list[int], reduced: list[int], memory_mode: str
) -> None:
    """As many elements as there are rows, however uneven."""
    found = exchanged(rank_pool, memory_mode, row_counts)
    assert found.without_graph == found.forward == [*collectives("broadcast_", *gathered), all_gather(7)]
    assert found.backward == collectives("reduce_", *reduced)


@pytest.mark.parametrize(("num_ranks", "rows_per_rank"), RANKS)
def test_top_logprobs(rank_pool: GetPool, num_ranks: int, rows_per_rank: int) -> None:
    """Of all shards together, also where there are more than a shard has."""
    problem, top_ks = head_problem(), (1, 3, 6, 11)
    case = HeadCase(problem=problem, rows_per_rank=rows_per_rank)
    by_rank = rank_pool(num_ranks).run(head_ranks.top_logprobs, case, top_ks)
    log_p = dense_log_softmax(problem)
    for results, top_k in zip(zip(*by_rank, strict=True), top_ks, strict=True):
        expected = log_p.topk(top_k)
        for got in results:
            assert torch.equal(got.ids, expected.indices)
            assert torch.equal(got.logprobs, results[0].logprobs)
            assert_within("top log-probs", got.logprobs, expected.values, atol=1e-12)
            labels = log_p.gather(1, problem.labels[:, None])[:, 0]
            assert_within("log-probs", got.label_logprobs, labels, atol=1e-12)


def dense_log_softmax(problem: HeadProblem) -> torch.Tensor:
    return (problem.hidden @ problem.weight.t() / problem.temperature[:, None]).log_softmax(-1)
