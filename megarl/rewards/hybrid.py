"""Mix the rewards of several judges: r = Σ_k w_k · f_k(r_k), over the judges k that are routed to the row's data
source.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.registry import Registry

_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class UntransformedRewards:
    """The rewards that one part of a mixture gave, before its transform: `values` of the rows it judged, and their
    `groups`.
    """

    values: Sequence[float]
    groups: Sequence[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summand:
    """One part of a mixture of rewards: its weight w_k, its transform f_k, and the bounds of the transform `clip`."""

    weight: float = 1.0
    transform: str = "identity"
    clip: tuple[float, float] | None = None


Transform = Callable[[UntransformedRewards, Summand], list[float]]
TRANSFORMS: Registry[Transform] = Registry("transform", key="rewards.hybrid.parts.NAME.transform")


@TRANSFORMS.register("identity")
def identity(untransformed: UntransformedRewards, summand: Summand) -> list[float]:
    """Return the rewards r unchanged."""
    return list(untransformed.values)


@TRANSFORMS.register("sigmoid")
def sigmoid(untransformed: UntransformedRewards, summand: Summand) -> list[float]:
    """Return 1 / (1 + e^−r); for a reward model, that is the probability of preference over an answer of reward 0."""
    # e^|r| would overflow.
    small = [math.exp(-abs(value)) for value in untransformed.values]
    return [1 / (1 + s) if value >= 0 else s / (1 + s) for value, s in zip(untransformed.values, small, strict=True)]


@TRANSFORMS.register("clip")
def clip(untransformed: UntransformedRewards, summand: Summand) -> list[float]:
    """Return the rewards clamped to the bounds of the summand, min(max(r, low), high)."""
    assert summand.clip is not None, "the configuration was checked"
    low, high = summand.clip
    return [min(max(value, low), high) for value in untransformed.values]


@TRANSFORMS.register("batch_zscore")
def batch_zscore(untransformed: UntransformedRewards, summand: Summand) -> list[float]:
    """Return (r − mean) / (std + 1e-6) over all rows that this judge rewarded, with n − 1 in the std; 0 for a single
    row.
    """
    return group_zscore(replace(untransformed, groups=[None] * len(untransformed.values)), summand)


@TRANSFORMS.register("group_zscore")
def group_zscore(untransformed: UntransformedRewards, summand: Summand) -> list[float]:
    """Return z-scores of the untransformed rewards, as `batch_zscore` does, but over the rows of each group."""
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(untransformed.groups):
        rows[group].append(row)
    scores = [0.0] * len(untransformed.values)
    for members in rows.values():
        n = len(members)
        if n < 2:
            continue
        mean = math.fsum(untransformed.values[row] for row in members) / n
        std = math.sqrt(math.fsum((untransformed.values[row] - mean) ** 2 for row in members) / (n - 1))
        for row in members:
            scores[row] = (untransformed.values[row] - mean) / (std + _EPS)
    return scores


def mix(
    rewards: Mapping[str, Mapping[int, float]], summands: Mapping[str, Summand], groups: Sequence[Hashable]
) -> dict[int, float]:
    """Return the mixed reward of each row: `rewards[part][row]` is r_k. `groups` has the group of every row."""
    total: dict[int, float] = defaultdict(float)
    for name, judged in rewards.items():
        summand, rows = summands[name], list(judged)
        untransformed = UntransformedRewards(values=[judged[row] for row in rows], groups=[groups[row] for row in rows])
        for row, value in zip(rows, TRANSFORMS.get(summand.transform)(untransformed, summand), strict=True):
            total[row] += summand.weight * value
    return dict(total)
