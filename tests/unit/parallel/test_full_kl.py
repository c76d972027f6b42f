"""The KL over the whole vocabulary on one rank, against dense float64 distributions."""

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


@pytest.mark.parametrize("chunk_tokens", [3, 100])
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
