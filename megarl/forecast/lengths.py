"""Describe how long responses are, when only their mean and their limit are known: the least committed distribution.

The density on [0, 1] that has the largest entropy for its mean is θ·e^{θx}/(e^θ − 1): uniform for a mean of a half
(θ = 0), rising for a larger one.
"""

import math
from functools import cache

# A decode loop is summed at this many points; steeper densities than this have all responses at an end.
POINTS, _STEEPEST = 16, 200.0


@cache
def alive(mean_share: float) -> tuple[float, ...]:
    """Return which share of the responses is longer than each of `POINTS` midpoints of [0, limit].

    >>> [round(share, 2) for share in alive(0.5)[:: POINTS // 4]]
    [0.97, 0.72, 0.47, 0.22]
    """
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(60):
        theta = (low + high) / 2
        low, high = (theta, high) if _mean(theta) < mean_share else (low, theta)
    if mean_share >= _mean(_STEEPEST):
        return (1.0,) * POINTS
    points = ((i + 0.5) / POINTS for i in range(POINTS))
    if abs(theta) < 1e-6:
        return tuple(1 - x for x in points)
    return tuple(math.expm1(theta * (x - 1)) / math.expm1(-theta) for x in points)


def _mean(theta: float) -> float:
    return 0.5 if abs(theta) < 1e-6 else -1 / math.expm1(-theta) - 1 / theta
