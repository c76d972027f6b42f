"""Two runs of one replay did the same: the tolerances that every layout is accepted by, in float32."""

from collections.abc import Sequence

import numpy as np
import torch

from tests.helpers.compare import assert_within
from tests.helpers.replays import Run

LOSS_PER_ADVANTAGE = 1e-4
GRAD_NORM_RELATIVE = 1e-4
LOGPROB_NATS = 1e-5
WEIGHT = 1e-6


def assert_same_steps(got: Run, expected: Run, *, mean_abs_advantage: float) -> None:
    """Both steps are within the acceptance tolerances, and forward passes agree with the training pass."""
    # The reference starts as the actor.
    assert_same_logprobs("scored", got.forward_logprobs, expected.steps[0].logprobs)
    assert_same_logprobs("reference", got.ref_logprobs, expected.steps[0].logprobs)
    for mine, theirs in zip(got.steps, expected.steps, strict=True):
        assert_same_logprobs("actor", mine.logprobs, theirs.logprobs)
        assert mine.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            relative = value * GRAD_NORM_RELATIVE if name == "actor/grad_norm" else None
            assert_within(name, mine.metrics[name], value, atol=relative or LOSS_PER_ADVANTAGE * mean_abs_advantage)
        assert_same_weights(mine.weights, theirs.weights)


def assert_same_logprobs(role: str, got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert_within(f"{role}'s log-probs", np.concatenate(got), np.concatenate(expected), atol=LOGPROB_NATS)


def assert_same_weights(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    errors = {name: (got[name].double() - expected[name].double()).abs().max().item() for name in expected}
    worst = max(errors, key=errors.__getitem__)
    assert_within(f"weights (worst: {worst})", errors[worst], 0.0, atol=WEIGHT)
