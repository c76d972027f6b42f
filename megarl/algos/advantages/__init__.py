"""Estimate advantages: turn rewards into one number per token, given all samples of each prompt (complete groups)."""

from megarl.algos.advantages import critic, group, reinforce, turns  # noqa: F401 - they fill the registry
from megarl.algos.advantages.estimator import (
    ADVANTAGE_ESTIMATORS,
    GREEDY_SCORE,
    Estimate,
    Estimator,
    Flip,
    compute_advantages,
    estimator_of,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "GREEDY_SCORE",
    "Estimate",
    "Estimator",
    "Flip",
    "compute_advantages",
    "estimator_of",
]
