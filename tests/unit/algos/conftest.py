"""Small batches for the algorithm tests."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.types import Row, RowBatch, ScoredBatch


@pytest.fixture(scope="session")
def make_scored() -> Callable[..., ScoredBatch]:
    """A float64 batch of sequence rewards; by default two loss tokens a row."""

    def make(uids: list[str], rewards: list[float], mask: Tensor | None = None, **quantities: Tensor) -> ScoredBatch:
        values = torch.tensor(rewards, dtype=torch.float64)
        loss_mask = torch.ones(len(uids), 2, dtype=torch.bool) if mask is None else mask
        return ScoredBatch(
            uids=tuple(uids), rewards=values, correct=values > 0, loss_mask=loss_mask, quantities=quantities
        )

    return make


@pytest.fixture(scope="session")
def make_rows() -> Callable[[Tensor], list[Row]]:
    """Rows with one prompt token and the loss masks given."""

    def make(mask: Tensor) -> list[Row]:
        return [
            Row(
                uid="q",
                sample_index=i,
                token_ids=np.zeros(mask.shape[1] + 1, dtype=np.int64),
                num_prompt_tokens=1,
                loss_mask=row.numpy(),
            )
            for i, row in enumerate(mask)
        ]

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., RowBatch]:
    def make(mask: Tensor, **quantities: Tensor) -> RowBatch:
        return RowBatch(labels=tuple(f"q/{i}" for i in range(len(mask))), loss_mask=mask, quantities=quantities)

    return make
