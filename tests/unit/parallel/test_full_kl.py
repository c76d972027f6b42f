"""The KL over the whole vocabulary on one rank, against dense float64 distributions."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megarl.parallel.head.statistics import vocab_shard
from tests.helpers.compare import assert_within
from tests.helpers.head import pair_kl

ONE_RANK: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_against_dense(dtype: torch.dtype, atol: float, chunk_tokens: int) -> None:
    hidden, other, weight = randn(7, 6, seed=0), randn(7, 6, seed=1), randn(16, 6, seed=2)
    p, q = ((h @ weight[:11].t() / 0.5).log_softmax(-1) for h in (hidden, other))
    got = pair_kl(
        hidden.to(dtype),
        other.to(dtype),
        weight.to(dtype),
        vocab_shard(ONE_RANK, 16, 11),
        temperature=0.5,
        chunk_tokens=chunk_tokens,
    )
    assert_within("KL", got, F.kl_div(q, p, log_target=True, reduction="none").sum(-1), atol=atol)


def test_two_coins() -> None:
    """By hand: KL of (3/4, 1/4) from (1/2, 1/2) is ¾ ln 3/2 + ¼ ln 1/2."""
    weight = torch.eye(2, dtype=torch.float64)
    hidden = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64)
    got = pair_kl(hidden, torch.zeros_like(hidden), weight, vocab_shard(ONE_RANK, 2, 2), temperature=1.0)
    assert_within(
        "KL", got, torch.tensor([0.75 * math.log(1.5) + 0.25 * math.log(0.5)], dtype=torch.float64), atol=1e-15
    )


def test_equal_states_and_no_rows() -> None:
    shard, weight = vocab_shard(ONE_RANK, 11, 11), randn(11, 6, seed=2)
    hidden = randn(3, 6, seed=0)
    assert pair_kl(hidden, hidden, weight, shard, temperature=1.0).abs().max() <= 1e-15
    assert pair_kl(hidden[:0], hidden[:0], weight, shard, temperature=1.0).shape == (0,)
