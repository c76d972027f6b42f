"""Remove groups (all samples of a prompt) that would teach little, such as those whose samples are all right."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from megarl.config.algo import FilterConfig
from megarl.errors import ConfigError, DataError
from megarl.registry import FunctionRegistry
from megarl.types import Reward

# Scores pass through float32, which changes 0.1 by 1.5e-9.
_SCORE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A prompt's samples as a filter sees them: the numbers of those that have a say, of all `num_rows` that there
    are.
    """

    uid: str
    scores: Sequence[float]
    num_rows: int


Keeps: TypeAlias = Callable[[ScoredGroup, FilterConfig], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """A filter, which says whether a group stays.

    turned_on_by: the field of `FilterConfig` that turns it on; None: it is on where `algo.filter.names` has its name.
    """

    keeps: Keeps = field(kw_only=False)
    turned_on_by: str | None = None


GROUP_FILTERS: FunctionRegistry[Keeps, GroupFilter] = FunctionRegistry(
    "filter", key="algo.filter.names", entry=GroupFilter, parameters=("group", "cfg")
)


@GROUP_FILTERS.register("mean_score", turned_on_by="mean_score")
def mean_within(group: ScoredGroup, cfg: FilterConfig) -> bool:
    """Keep a group if low < mean score < high, with `mean_score` = [low, high] (dynamic sampling, arXiv:2503.14476).

    >>> cfg = FilterConfig(mean_score=(0.0, 1.0))
    >>> mean_within(ScoredGroup(uid="a", scores=[1.0, 0.0], num_rows=2), cfg)
    True
    """
    if group.num_rows == 1:
        raise DataError(
            f"group {group.uid!r}: got 1 row, expected all samples of the prompt, at least 2, to judge its mean score"
        )
    assert cfg.mean_score is not None
    low, high = cfg.mean_score
    return low < math.fsum(group.scores) / len(group.scores) < high


@GROUP_FILTERS.register("uniform_scores", turned_on_by="uniform_scores")
def not_uniform(group: ScoredGroup, cfg: FilterConfig) -> bool:
    """Remove a group whose scores all equal one of the values of `uniform_scores` (within 1e-6).

    >>> not_uniform(ScoredGroup(uid="a", scores=[1.0, 1.0], num_rows=2), FilterConfig(uniform_scores=(1.0,)))
    False
    """
    return not any(all(abs(each - value) <= _SCORE_TOLERANCE for each in group.scores) for value in cfg.uniform_scores)


def filters_of(cfg: FilterConfig) -> list[GroupFilter]:
    """Return the filters that a configuration turns on; raise ConfigError for a name that no plugin has registered.

    >>> [each.turned_on_by for each in filters_of(FilterConfig(mean_score=(0.0, 1.0)))]
    ['mean_score']
    """
    for name in cfg.names:
        if (setting := GROUP_FILTERS.get(name).turned_on_by) is not None:
            raise ConfigError(
                f"algo.filter.names: got {name!r}, which algo.filter.{setting} turns on; set that instead"
            )
    settings = [each for each in GROUP_FILTERS.entries().values() if each.turned_on_by is not None]
    on = [each for each in settings if getattr(cfg, str(each.turned_on_by)) not in (None, ())]
    return [*on, *map(GROUP_FILTERS.get, cfg.names)]


def filter_scores(rewards: Sequence[Reward], cfg: FilterConfig) -> list[float]:
    """Return the value that the filter reads for each sample: correctness (0 or 1), the sample's own score or its
    reward, as `algo.filter.by` says.

    >>> rewards = [Reward(score=-1.0, correct=False, own_score=0.25), Reward(score=1.0, correct=True)]
    >>> filter_scores(rewards, FilterConfig()), filter_scores(rewards, FilterConfig(by="score"))
    ([0.0, 1.0], [0.25, 1.0])
    """
    if cfg.by == "correct":
        return [float(reward.correct) for reward in rewards]
    own = cfg.by == "score"
    return [reward.own_score if own and reward.own_score is not None else reward.score for reward in rewards]


def kept_rows(
    scores: Sequence[float], uids: Sequence[str], cfg: FilterConfig, *, demonstrated: Sequence[bool] | None = None
) -> tuple[bool, ...]:
    """Return, for each row, whether all filters keep it; they keep or remove a whole group (the rows with one uid).

    scores: from `filter_scores`. demonstrated: whether a row begins with a demonstration. Without
    `count_demonstrations`, such rows have no say, unless the group has no others.

    Raises:
        DataError: a score is not finite, or `mean_score` is set and a group has one row.

    >>> kept_rows([1.0, 0.0, 1.0, 1.0], "aabb", FilterConfig(mean_score=(0.0, 1.0)))
    (True, True, False, False)
    """
    groups = _group_rows(uids)
    removed, filters = set[str](), filters_of(cfg)
    for uid, rows in groups.items():
        own = rows if cfg.count_demonstrations or demonstrated is None else [i for i in rows if not demonstrated[i]]
        values = [float(scores[i]) for i in own or rows]
        bad = [value for value in values if not math.isfinite(value)]
        if bad:
            raise DataError(f"score of group {uid!r}: got {bad[0]}, expected a finite number; check the scorer")
        group = ScoredGroup(uid=uid, scores=values, num_rows=len(rows))
        if not all(each.keeps(group, cfg) for each in filters):
            removed.add(uid)
    return tuple(uid not in removed for uid in uids)


def group_metrics(
    correct: Sequence[bool],
    uids: Sequence[str],
    keep: Sequence[bool],
    *,
    demonstrated: Sequence[bool] | None = None,
) -> dict[str, float]:
    """Compute metrics of the sampled groups: how many were sampled and removed, and how many rows are correct.

    filter/num_groups, filter/num_groups_removed: groups sampled, and groups that filters removed. batch/solve_none,
    batch/solve_all: groups without and with only correct rows. batch/solved: share of correct rows. batch/on_solved,
    batch/off_solved: the same for rows without and with a demonstration. batch/failed: share of wrong rows among the
    rows that were kept. All except the last count removed groups too.

    >>> group_metrics([True, False], "aa", [True, True])["batch/solved"]
    0.5
    """
    groups = _group_rows(uids).values()
    metrics = {
        "filter/num_groups": len(groups),
        "filter/num_groups_removed": sum(not keep[rows[0]] for rows in groups),
        "batch/solve_none": sum(not any(correct[i] for i in rows) for rows in groups),
        "batch/solve_all": sum(all(correct[i] for i in rows) for rows in groups),
    }
    marks = [False] * len(uids) if demonstrated is None else demonstrated
    parts = {
        "batch/solved": correct,
        "batch/failed": [not c for c, stays in zip(correct, keep, strict=True) if stays],
        "batch/on_solved": [c for c, mark in zip(correct, marks, strict=True) if not mark],
        "batch/off_solved": [c for c, mark in zip(correct, marks, strict=True) if mark],
    }
    shares = {name: sum(map(bool, rows)) / len(rows) for name, rows in parts.items() if len(rows)}
    return {name: float(value) for name, value in (metrics | shares).items()}


def check_filter(cfg: FilterConfig, *, num_samples: int) -> None:
    """Raise ConfigError for groups too small to judge, or refills without a filter.

    `check_filter_ranges` checks the bounds against the numbers that can occur.

    >>> check_filter(FilterConfig(max_refills=3), num_samples=8)
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.filter.max_refills: got 3 without a filter that removes groups; ...
    """
    filters = filters_of(cfg)
    if filters and num_samples < 2:
        raise ConfigError(
            f"algo.filter: got rollout.num_samples={num_samples}, expected at least 2 samples of a prompt to judge its "
            "group by; raise rollout.num_samples or take algo.filter away"
        )
    if cfg.max_refills and not filters:
        raise ConfigError(
            f"algo.filter.max_refills: got {cfg.max_refills} without a filter that removes groups; set "
            "algo.filter.mean_score or algo.filter.uniform_scores, or algo.filter.max_refills=0"
        )


def check_filter_ranges(cfg: FilterConfig, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise ConfigError if a filter's bound or value lies outside of the numbers that a data source can produce.

    ranges: data source → its lowest and highest number, for the sources whose range is known.

    >>> check_filter_ranges(FilterConfig(mean_score=(-1.0, 1.0)), {"gsm8k": (0.0, 1.0)})
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.filter.mean_score: got [-1.0, 1.0], but with algo.filter.by=correct the numbers ...
    """
    given = {"mean_score": cfg.mean_score or (), "uniform_scores": cfg.uniform_scores}
    for source, (low, high) in ranges.items():
        for name, values in given.items():
            if any(not low - _SCORE_TOLERANCE <= value <= high + _SCORE_TOLERANCE for value in values):
                raise ConfigError(
                    f"algo.filter.{name}: got {list(values)}, but with algo.filter.by={cfg.by} the numbers of data "
                    f"source {source!r} lie in [{low:g}, {high:g}]; take values from there, or another algo.filter.by"
                )


def _group_rows(uids: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i, uid in enumerate(uids):
        groups.setdefault(uid, []).append(i)
    return groups
