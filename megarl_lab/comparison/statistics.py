"""Compute the statistics of a few seeds: each group's mean and spread, and whether two means differ clearly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The p-value below which a difference is called clear, after Holm's correction.
CLEAR_P_VALUE = 0.05
# Nodes of the quadrature in `two_sided_p`: its error stays below 2e-6 for 1 to 3000 degrees of freedom.
_NUM_NODES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The spread of some values: mean, extremes and sample standard deviation.

    std: divided by count − 1; None for a single value.
    """

    count: int
    mean: float
    std: float | None
    min: float
    max: float


def spread_of(values: Sequence[float]) -> Spread:
    """Compute the mean and spread of one or more values."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    std = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None
    return Spread(count=len(values), mean=mean, std=std, min=min(values), max=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between two groups' means.

    std_error: √(s₁²/n₁ + s₂²/n₂), or s/√n of the differences of n pairs; None if there is a single value. p_value:
    two-sided, of a t-test; None if there is no standard error, or it is 0. least: the smallest difference that would
    have been clear, alone, with the same standard error.
    """

    mean: float
    std_error: float | None = None
    p_value: float | None = None
    least: float | None = None


def _tested(mean: float, std_error: float, dof: float) -> Difference:
    if std_error == 0.0:
        return Difference(mean=mean, std_error=0.0)
    low, high = 0.0, 1e4
    while high - low > 1e-6 * high:
        t = (low + high) / 2
        low, high = (t, high) if two_sided_p(t, dof) > CLEAR_P_VALUE else (low, t)
    p_value = two_sided_p(mean / std_error, dof)
    return Difference(mean=mean, std_error=std_error, p_value=p_value, least=high * std_error)


def difference_of(group: Spread, baseline: Spread) -> Difference:
    """Compare the means of two groups by Welch's t-test, which does not assume equal variances.

    Degrees of freedom by Welch and Satterthwaite: (v₁ + v₂)² / (v₁²/(n₁ − 1) + v₂²/(n₂ − 1)) with v = s²/n.
    """
    mean = group.mean - baseline.mean
    if group.std is None or baseline.std is None:
        return Difference(mean=mean)
    ours, theirs = group.std**2 / group.count, baseline.std**2 / baseline.count
    std_error = math.sqrt(ours + theirs)
    if std_error == 0.0:
        return Difference(mean=mean, std_error=0.0)
    dof = (ours + theirs) ** 2 / (ours**2 / (group.count - 1) + theirs**2 / (baseline.count - 1))
    return _tested(mean, std_error, dof)


def paired_difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Compare values with baseline values of the same seed, by the t-test of their differences."""
    spread = spread_of([value - baseline for value, baseline in pairs])
    if spread.std is None:
        return Difference(mean=spread.mean)
    return _tested(spread.mean, spread.std / math.sqrt(spread.count), spread.count - 1)


def two_sided_p(t: float, dof: float) -> float:
    """Compute P(|T| > |t|) of Student's t distribution with `dof` ≥ 1 degrees of freedom.

    With T = √dof · tan θ the density becomes c · cos^(dof − 1) θ, smooth on a finite interval:
    p = 2c ∫ from arctan(|t|/√dof) to π/2, with c = Γ((dof + 1)/2) / (√π Γ(dof/2)).
    """
    log_c = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - math.log(math.pi) / 2
    start = math.atan(abs(t) / math.sqrt(dof))
    nodes, weights = np.polynomial.legendre.leggauss(_NUM_NODES)
    half = (math.pi / 2 - start) / 2
    theta = start + half * (nodes + 1)
    return min(1.0, 2 * math.exp(log_c) * half * float(weights @ np.cos(theta) ** (dof - 1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of several comparisons, so that the chance of any false finding is that of one test (Holm,
    1979).

    The smallest is multiplied by their number m, the next by m − 1, …; none becomes smaller than one before it.
    """
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        floor = max(floor, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = floor
    return adjusted
