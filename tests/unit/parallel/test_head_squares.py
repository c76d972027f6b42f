"""Sums of squared probabilities of the log-prob head on one rank, against dense float64 softmax."""

import pytest
import torch

from tests.helpers.compare import assert_within
from tests.helpers.head import HeadProblem, dense_head, head_problem, nucleus_problem
from tests.helpers.head_ranks import ONE_RANK, HeadCase, dense_squares, squares_result


@pytest.mark.parametrize("problem", [head_problem(), nucleus_problem(), head_problem(num_rows=0)])
@pytest.mark.parametrize("chunk_tokens", [1, 3, None])
def test_against_dense(problem: HeadProblem, chunk_tokens: int | None) -> None:
    from megarl.parallel.head.statistics import vocab_shard

    case = HeadCase(problem=problem, rows_per_rank=16, chunk_tokens=chunk_tokens)
    shard = vocab_shard(ONE_RANK, 16, problem.vocab_size)
    logprobs, squares = squares_result(case, problem.padded_weight(16), shard)
    assert_within("squares", squares, dense_squares(problem), atol=1e-12)
    # The log-probs are those of the pass without.
    assert_within("log-probs", logprobs, dense_head(problem).logprobs, atol=1e-12)


def test_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5 at temperature 1: 1 + 4 + 25 of 64. A fourth, padded row would count most."""
    from megarl.parallel.head.logprobs import HeadOptions, head_inputs
    from megarl.parallel.head.statistics import row_statistics, vocab_shard

    weight = torch.tensor([[1.0], [2.0], [5.0], [8.0]], dtype=torch.float64).log()
    hidden, shard = torch.ones(1, 1, dtype=torch.float64), vocab_shard(ONE_RANK, 4, 3)
    x = head_inputs(hidden, weight, torch.tensor([0]), shard=shard, options=HeadOptions())
    found = row_statistics(x, squares=True)
    assert found.squares is not None
    assert found.squares.tolist() == pytest.approx([30 / 64])
