"""Worked numbers of the algorithms, from their specification."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.host import loop
from megarl.weights.families import ModelSpec, read_model_spec
from tests.helpers.small_model import write_config

GOLDEN = Path(__file__).parents[1] / "golden" / "algos.json"

GoldenCase = Callable[[str], dict[str, Any]]
GoldenCheck = Callable[[Any, Any, dict[str, Any]], None]


@pytest.fixture(autouse=True)
def no_leftover_tasks() -> Iterator[None]:
    """What a test began and did not wait for ends with it."""
    yield
    loop.abandon()


@pytest.fixture(scope="session")
def golden() -> GoldenCase:
    """A case by its id; inputs that several cases share are filled in."""
    content = json.loads(GOLDEN.read_text(encoding="utf-8"))
    cases = {case["id"]: case for case in content["cases"]}
    for case in cases.values():
        if "$ref" in case["inputs"]:
            case["inputs"] = content["shared"][case["inputs"]["$ref"]]
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


@pytest.fixture
def small(tmp_path: Path) -> ModelSpec:
    """A model small enough to count by hand."""
    return read_model_spec(write_config(tmp_path / "small"))


@pytest.fixture
def small_tied(tmp_path: Path) -> ModelSpec:
    """The same with tied embeddings."""
    return read_model_spec(write_config(tmp_path / "small", tie_word_embeddings=True))
