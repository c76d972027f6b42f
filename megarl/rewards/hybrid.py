"""Mixtures of rewards: r = Σ_k w_k · f_k(r_k) over the parts of a row's data source."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from megarl.registry import Registry

_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Rewards of one part: `values` of those rows of a batch that it judged, and the group of each."""

    values: Sequence[float]
    groups: Sequence[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summand:
    """w_k and f_k; `clip` is that of the transform of this name."""

    weight: float = 1.0
    transform: str = "identity"
    clip: tuple[float, float] | None = None


Transform = Callable[[Raw, Summand], list[float]]
TRANSFORMS: Registry[Transform] = Registry("transform", key="rewards.hybrid.parts.NAME.transform")


@TRANSFORMS.register("identity")
def identity(raw: Raw, summand: Summand) -> list[float]:
    """r."""
    return list(raw.values)


@TRANSFORMS.register("sigmoid")
def sigmoid(raw: Raw, summand: Summand) -> list[float]:
    """1 / (1 + e^−r): of a reward model, the probability that the answer is preferred to one of reward 0."""
    return [_logistic(value) for value in raw.values]


@TRANSFORMS.register("clip")
def clip(raw: Raw, summand: Summand) -> list[float]:
    """min(max(r, low), high)."""
    assert summand.clip is not None, "the configuration was checked"
    low, high = summand.clip
    return [min(max(value, low), high) for value in raw.values]


@TRANSFORMS.register("batch_zscore")
def batch_zscore(raw: Raw, summand: Summand) -> list[float]:
    """(r − mean) / (std + 1e-6) over all rows that the part judged, std with n − 1; 0 if there is one row."""
    return _zscores(raw.values)


@TRANSFORMS.register("group_zscore")
def group_zscore(raw: Raw, summand: Summand) -> list[float]:
    """As `batch_zscore`, over the rows of each group."""
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(raw.groups):
        rows[group].append(row)
    scores = [0.0] * len(raw.values)
    for members in rows.values():
        for row, score in zip(members, _zscores([raw.values[i] for i in members]), strict=True):
            scores[row] = score
    return scores


def mix(
    rewards: Mapping[str, Mapping[int, float]], summands: Mapping[str, Summand], groups: Sequence[Hashable]
) -> dict[int, float]:
    """The mixture by row. `rewards[part][row]` is r_k; `groups` is of every row, judged or not."""
    total: dict[int, float] = defaultdict(float)
    for name, judged in rewards.items():
        summand, rows = summands[name], list(judged)
        raw = Raw(values=[judged[row] for row in rows], groups=[groups[row] for row in rows])
        for row, value in zip(rows, TRANSFORMS.get(summand.transform)(raw, summand), strict=True):
            total[row] += summand.weight * value
    return dict(total)


def _logistic(value: float) -> float:
    # e^|r| would overflow.
    small = math.exp(-abs(value))
    return 1 / (1 + small) if value >= 0 else small / (1 + small)


def _zscores(values: Sequence[float]) -> list[float]:
    n = len(values)
    if n < 2:
        return [0.0] * n
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return [(value - mean) / (std + _EPS) for value in values]
