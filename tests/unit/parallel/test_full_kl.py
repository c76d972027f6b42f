"""The KL over the whole vocabulary on one rank, against dense float64 distributions."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megarl.parallel.full_kl import vocab_parallel_kl
from megarl.parallel.logprobs import vocab_shard
from tests.helpers.compare import assert_within

ONE_RANK: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_against_dense(dtype: torch.dtype, atol: float, chunk_tokens: int) -> None:
    hidden, other, weight = randn(7, 6, seed=0), randn(7, 6, seed=1), randn(16, 6, seed=2)
    p, q = ((h @ weight[:11].t() / 0.5).log_softmax(-1) for h in (hidden, other))
    got = vocab_parallel_kl(
        hidden.to(dtype),
        other.to(dtype),
        weight.to(dtype),
        shard=vocab_shard(ONE_RANK, 16, 11),
        temperature=0.5,
        chunk_tokens=chunk_tokens,
    )
    assert_within("KL", got, F.kl_div(q, p, log_target=True, reduction="none").sum(-1), atol=atol)


def test_two_coins() -> None:
    """By hand: KL of (3/4, 1/4) from (1/2, 1/2) is ¾ ln 3/2 + ¼ ln 1/2."""
    weight = torch.eye(2, dtype=torch.float64)
    hidden = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64)
    got = vocab_parallel_kl(
        hidden, torch.zeros_like(hidden), weight, shard=vocab_shard(ONE_RANK, 2, 2), temperature=1.0
    )
    assert_within(
        "KL", got, torch.tensor([0.75 * math.log(1.5) + 0.25 * math.log(0.5)], dtype=torch.float64), atol=1e-15
    )


def test_equal_states_and_no_rows() -> None:
    shard, weight = vocab_shard(ONE_RANK, 11, 11), randn(11, 6, seed=2)
    hidden = randn(3, 6, seed=0)
    assert vocab_parallel_kl(hidden, hidden, weight, shard=shard, temperature=1.0).abs().max() <= 1e-15
    assert vocab_parallel_kl(hidden[:0], hidden[:0], weight, shard=shard, temperature=1.0).shape == (0,)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"hidden has shape \(3, 6\), other \(2, 6\)"):
        vocab_parallel_kl(
            randn(3, 6, seed=0),
            randn(2, 6, seed=0),
            randn(11, 6, seed=0),
            shard=vocab_shard(ONE_RANK, 11, 11),
            temperature=1.0,
        )
