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
        ({}, [8, 8, 8, 8]),
        # Step 0 is already trained on: warm-up starts above 0 and ends at step 3.
        ({"warmup_steps": 4}, [2, 4, 6, 8]),
        # A warm-up that is longer than the run ends with it.
        ({"warmup_steps": 8}, [2, 4, 6, 8]),
        # Down to a quarter of the run's rate at its end, which is the step after the last one.
        ({"schedule": "linear"}, [8, 6, 4, 2]),
        ({"schedule": "linear", "decay_frac": 0.5}, [8, 8, 8, 4]),
        ({"schedule": "linear", "min_lr_frac": 0.5}, [8, 7, 6, 5]),
        ({"schedule": "linear", "warmup_steps": 2}, [4, 6, 4, 2]),
        # (1 − cos πx)/2 for x = 1, 3/4, 1/2, 1/4: 1, 0.853553, 0.5, 0.146447.
        ({"schedule": "cosine"}, [8, 6.828427, 4, 1.171573]),
        ({"schedule": "cosine", "decay_frac": 0.5, "min_lr_frac": 0.5}, [8, 8, 8, 6]),
        # A decay shorter than a step is a step.
        ({"schedule": "linear", "decay_frac": 0.01}, [8, 8, 8, 8]),
    ],
)
def test_four_steps(config: dict[str, Any], expected: list[float]) -> None:
    assert rates(4, **config) == pytest.approx(expected, abs=1e-6)


def test_the_schedule_arrives() -> None:
    optimizer = OptimizerConfig(lr=8.0, schedule="linear", min_lr_frac=0.25)
    assert learning_rate(optimizer, 4, 4) == pytest.approx(2.0)
    assert learning_rate(optimizer, 0, 1) == pytest.approx(8.0)
