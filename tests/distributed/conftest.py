"""Checkpoints that the multi-rank tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(tied, dtype, num_layers, max_shard_size) → a model directory, made once."""
    made: dict[tuple[bool, str, int, str | int], Path] = {}

    def get(*, tied: bool, dtype: str = "float32", num_layers: int = 2, max_shard_size: str | int = "50GB") -> Path:
        key = (tied, dtype, num_layers, max_shard_size)
        if key not in made:
            path = tmp_path_factory.mktemp("checkpoint")
            made[key] = make_checkpoint(
                path, tied=tied, dtype=dtype, num_layers=num_layers, max_shard_size=max_shard_size
            )
        return made[key]

    return get
