"""Models small enough to count by hand."""

from pathlib import Path

import pytest

from megarl.parallel.weights.families import ModelSpec, read_model_spec
from tests.helpers.small_model import write_config


@pytest.fixture
def small(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_config(tmp_path / "small"))


@pytest.fixture
def small_tied(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_config(tmp_path / "small", tie_word_embeddings=True))
