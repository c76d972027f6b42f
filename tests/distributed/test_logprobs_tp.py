"""The log-prob head on two vocabulary shards, against dense float64 log_softmax."""

from collections.abc import Callable

import pytest
import torch

from tests.helpers import rank_parts
from tests.helpers.compare import assert_within
from tests.helpers.head import HeadProblem, HeadResult, dense_head, head_problem
from tests.helpers.rank_pool import RankPool

GetPool = Callable[[int], RankPool]


def run_head(pool: RankPool, problem: HeadProblem, rows_per_rank: int, chunk_tokens: int) -> HeadResult:
    """Both ranks' results in one: equal values and gradients of hidden, shards of weight joined."""
    first, second = pool.run(rank_parts.head, problem, rows_per_rank, chunk_tokens)
    assert torch.equal(first.logprobs, second.logprobs)
    assert torch.equal(first.entropy, second.entropy)
    assert torch.equal(first.grad_hidden, second.grad_hidden)
    grad_weight = torch.cat([first.grad_weight, second.grad_weight])
    assert not grad_weight[problem.vocab_size :].any()
    return HeadResult(
        logprobs=first.logprobs,
        entropy=first.entropy,
        grad_hidden=first.grad_hidden,
        grad_weight=grad_weight[: problem.vocab_size],
    )


def assert_head_is_exact(
    pool: RankPool, problem: HeadProblem, *, rows_per_rank: int, chunk_tokens: int = 3, atol: float = 1e-12
) -> None:
    got = run_head(pool, problem, rows_per_rank, chunk_tokens)
    expected = dense_head(problem)
    for name in ("logprobs", "entropy", "grad_hidden", "grad_weight"):
        assert_within(name, getattr(got, name), getattr(expected, name), atol=atol)


@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "no-entropy"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7])
def test_chunks(rank_pool: GetPool, chunk_tokens: int, with_entropy: bool) -> None:
    problem = head_problem(with_entropy=with_entropy)
    assert_head_is_exact(rank_pool(2), problem, rows_per_rank=8, chunk_tokens=chunk_tokens)


def test_a_shard_of_padding_alone(rank_pool: GetPool) -> None:
    assert_head_is_exact(rank_pool(2), head_problem(), rows_per_rank=16)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows(rank_pool: GetPool, num_rows: int) -> None:
    assert_head_is_exact(rank_pool(2), head_problem(num_rows=num_rows), rows_per_rank=8)


def test_float32(rank_pool: GetPool) -> None:
    assert_head_is_exact(rank_pool(2), head_problem(dtype=torch.float32), rows_per_rank=8, atol=1e-5)


@pytest.mark.parametrize("shard", [0, 1])
def test_all_mass_on_one_shard(rank_pool: GetPool, shard: int) -> None:
    """The logits of one shard are near −2000: its exponentials underflow in any format."""
    problem = head_problem()
    rows = slice(8, 11) if shard == 0 else slice(0, 8)
    problem.hidden[:, 0] = 1.0
    problem.weight[rows, 0] = -1000.0
    problem.weight[:, 0][problem.weight[:, 0] != -1000.0] = 0.0
    assert_head_is_exact(rank_pool(2), problem, rows_per_rank=8, atol=1e-9)


def test_all_logits_very_negative(rank_pool: GetPool) -> None:
    problem = head_problem()
    problem.hidden[:, 0] = 1e3
    problem.weight[:, 0] = -100.0
    # Logits of 2e5 have float64 steps of 3e-11, and gradients multiply their errors by up to 1e3.
    assert_head_is_exact(rank_pool(2), problem, rows_per_rank=8, atol=1e-7)
