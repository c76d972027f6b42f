"""The log-prob head on one rank, against dense float64 log_softmax."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.parallel.head.logprobs import vocab_parallel_logprobs
from megarl.parallel.head.statistics import vocab_shard
from tests.helpers.compare import assert_within
from tests.helpers.head import head_problem


def group_of(rank: int, size: int) -> Any:
    """A process group as far as the head reads it when there is one rank."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


ONE_RANK = group_of(0, 1)


def test_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5: p = 1/8, 2/8, 5/8. A fourth, padded row would take half of the mass."""
    weight = torch.tensor([[1.0], [2.0], [5.0], [8.0]], dtype=torch.float64).log()
    labels = torch.tensor([0, 2])
    hidden = torch.ones(2, 1, dtype=torch.float64)
    shard = vocab_shard(ONE_RANK, 4, 3)
    assert (shard.start, shard.size) == (0, 3)
    out = vocab_parallel_logprobs(hidden, weight, labels, shard=shard)
    p = torch.tensor([1 / 8, 2 / 8, 5 / 8], dtype=torch.float64)
    assert_within("log-probs", out.logprobs, p[labels].log(), atol=1e-15)
    assert_within("entropy", out.entropy, [-(p * p.log()).sum().item()] * 2, atol=1e-15)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_far_from_zero(offset: float) -> None:
    """A constant added to all logits changes nothing; float32 exponentials of them would."""
    problem = head_problem(dtype=torch.float32)
    column = torch.full((problem.vocab_size, 1), offset)
    shifted = vocab_parallel_logprobs(
        torch.cat([problem.hidden, torch.ones(7, 1)], dim=1),
        torch.cat([problem.weight, column], dim=1),
        problem.labels,
        shard=vocab_shard(ONE_RANK, problem.vocab_size, problem.vocab_size),
    )
    plain = (problem.hidden.double() @ problem.weight.double().t()).log_softmax(-1)
    # Numbers near 1e4 have float32 steps of 1e-3.
    expected = plain.gather(1, problem.labels[:, None])[:, 0]
    assert_within("log-probs", shifted.logprobs, expected, atol=2e-3)
    assert_within("entropy", shifted.entropy, -(plain.exp() * plain).sum(-1), atol=2e-3)


@pytest.mark.parametrize(
    ("size", "rows_per_rank", "expected"),
    [
        (1, 16, [(0, 11)]),
        (2, 8, [(0, 8), (8, 3)]),
        # All of the second half, then parts of the last two shards are padding.
        (2, 16, [(0, 11), (16, 0)]),
        (4, 4, [(0, 4), (4, 4), (8, 3), (12, 0)]),
    ],
)
def test_shards_cover_the_true_vocabulary(size: int, rows_per_rank: int, expected: list[tuple[int, int]]) -> None:
    shards = [vocab_shard(group_of(rank, size), rows_per_rank, 11) for rank in range(size)]
    assert [(shard.start, shard.size) for shard in shards] == expected


def test_entropy_golden(golden: Any, check_golden: Any) -> None:
    """Logits are hidden states under the identity."""
    case = golden("C.entropy")
    logits = torch.tensor([case["inputs"]["logits"]], dtype=torch.float64)
    out = vocab_parallel_logprobs(
        logits, torch.eye(3, dtype=torch.float64), torch.tensor([0]), shard=vocab_shard(ONE_RANK, 3, 3)
    )
    check_golden(out.entropy[0], case["expected"], case)
