"""Golden cases and small batches for the algorithm tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.types import Row, RowBatch, ScoredBatch

GOLDEN = Path(__file__).parents[2] / "golden" / "algos.json"

GoldenCase = Callable[[str], dict[str, Any]]
GoldenCheck = Callable[[Any, Any, dict[str, Any]], None]


@pytest.fixture(scope="session")
def golden() -> GoldenCase:
    cases = {case["id"]: case for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]}
    return cases.__getitem__


@pytest.fixture(scope="session")
def check_golden() -> GoldenCheck:
    """|got − expected| ≤ tol·max(1, |expected|)."""

    def check(got: Any, expected: Any, case: dict[str, Any]) -> None:
        got, expected = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (got, expected))
        assert got.shape == expected.shape
        error = (got - expected).abs() / expected.abs().clamp(min=1)
        assert float(error.max()) <= case["tol"], f"{case['id']}: got {got}, expected {expected}"

    return check


@pytest.fixture(scope="session")
def make_scored() -> Callable[..., ScoredBatch]:
    """A float64 batch of sequence rewards; by default two loss tokens a row."""

    def make(uids: list[str], rewards: list[float], mask: Tensor | None = None, **scores: Tensor) -> ScoredBatch:
        values = torch.tensor(rewards, dtype=torch.float64)
        loss_mask = torch.ones(len(uids), 2, dtype=torch.bool) if mask is None else mask
        return ScoredBatch(uids=tuple(uids), rewards=values, correct=values > 0, loss_mask=loss_mask, scores=scores)

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
    def make(mask: Tensor, **scores: Tensor) -> RowBatch:
        return RowBatch(labels=tuple(f"q/{i}" for i in range(len(mask))), loss_mask=mask, scores=scores)

    return make
