"""Learning rates by hand."""

from typing import Any

import pytest

from megarl.config.optimizer import learning_rate
from megarl.config.schema import OptimizerConfig


def rates(total_steps: int, **config: Any) -> list[float]:
    optimizer = OptimizerConfig(lr=8.0, **config)
    return [learning_rate(optimizer, step, total_steps) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"warmup_steps": 4}, [2, 4, 6, 8]),
        ({"warmup_steps": 8}, [2, 4, 6, 8]),
        ({"schedule": "linear"}, [8, 6, 4, 2]),
        ({"schedule": "linear", "decay_frac": 0.5}, [8, 8, 8, 4]),
        ({"schedule": "linear", "min_lr_frac": 0.5}, [8, 7, 6, 5]),
        ({"schedule": "linear", "warmup_steps": 2}, [4, 6, 4, 2]),
        ({"schedule": "cosine", "decay_frac": 0.5, "min_lr_frac": 0.5}, [8, 8, 8, 6]),
        ({"schedule": "linear", "decay_frac": 0.01}, [8, 8, 8, 8]),
    ],
)
def test_four_steps(config: dict[str, Any], expected: list[float]) -> None:
    assert rates(4, **config) == pytest.approx(expected, abs=1e-6)


def test_the_schedule_arrives() -> None:
    optimizer = OptimizerConfig(lr=8.0, schedule="linear", min_lr_frac=0.25)
    assert learning_rate(optimizer, 4, 4) == pytest.approx(2.0)
    assert learning_rate(optimizer, 0, 1) == pytest.approx(8.0)
