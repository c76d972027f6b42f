"""Which groups stay, by uid and never by place."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.filters import check_filter, check_filter_ranges, filter_scores, group_metrics, kept_rows
from megarl.config.algo import FilterConfig
from megarl.config.setting import check_values
from megarl.errors import ConfigError, DataError
from megarl.types import Reward

STRICT = FilterConfig(mean_score=(0.0, 1.0))


def rows_of(groups: list[list[float]]) -> tuple[list[float], list[str]]:
    """Scores and uids of all rows, group by group."""
    return [s for group in groups for s in group], [f"q{i}" for i, group in enumerate(groups) for _ in group]


def kept_groups(groups: list[list[float]], cfg: FilterConfig) -> list[bool]:
    scores, uids = rows_of(groups)
    keep = dict(zip(uids, kept_rows(scores, uids, cfg), strict=True))
    return list(keep.values())


def test_dynamic_filter_golden(golden: Any) -> None:
    case = golden("D.dynamic_filter")
    cfg = FilterConfig(mean_score=tuple(case["params"]["range"]))
    assert kept_groups(case["inputs"]["scores"], cfg) == case["expected"]


def test_uniform_groups_golden(golden: Any) -> None:
    case = golden("E.reject")
    # Fail, success and format value of the two scoring conventions.
    values = {0: (0.0, 1.0, -1.0), 1: (-0.5, 1.0, -1.0)}
    got = [
        kept_groups([reward], FilterConfig(uniform_scores=values[version]))[0]
        for reward, version in zip(case["inputs"]["reward"], case["inputs"]["version"], strict=True)
    ]
    assert got == case["expected"]


def test_bounds_are_strict_and_zero_counts_as_a_score() -> None:
    cfg = FilterConfig(mean_score=(0.25, 0.75))
    # Means ¼, ½, ¾; with zeros taken for missing the first would be 1 and the second 2.
    assert kept_groups([[1, 0, 0, 0], [0, 2, 0, 0], [1, 1, 1, 0]], cfg) == [False, True, False]


def test_uniform_scores_judge_each_value_for_itself_within_a_tolerance() -> None:
    cfg = FilterConfig(uniform_scores=(0.1, 1.0))
    float32_tenth = 0.10000000149011612
    groups = [[float32_tenth] * 3, [0.1, 1.0], [0.5, 0.5], [0.1001, 0.1001]]
    assert kept_groups(groups, cfg) == [False, True, True, True]


def test_both_filters_together() -> None:
    cfg = FilterConfig(mean_score=(-1.0, 1.0), uniform_scores=(0.0,))
    assert kept_groups([[0, 0], [0.5, 0], [1, 1]], cfg) == [False, True, False]


def test_without_a_filter_everything_stays() -> None:
    assert kept_groups([[0], [1, 1]], FilterConfig()) == [True, True]
    assert kept_rows([], [], STRICT) == ()


def test_demonstrations_count_only_if_asked_for() -> None:
    # q0: an always correct demonstration beside failures; q1: nothing but demonstrations.
    scores, uids = [1.0, 0.0, 0.0, 1.0, 1.0], ["q0", "q0", "q0", "q1", "q1"]
    marks = [True, False, False, True, True]
    for cfg in (FilterConfig(uniform_scores=(0.0, 1.0)), STRICT):
        assert kept_rows(scores, uids, cfg, demonstrated=marks) == (True, True, True, False, False)
    for strict in (
        FilterConfig(uniform_scores=(0.0, 1.0), count_demonstrations=False),
        FilterConfig(mean_score=(0.0, 1.0), count_demonstrations=False),
    ):
        assert kept_rows(scores, uids, strict, demonstrated=marks) == (False,) * 5


def test_metrics_by_hand() -> None:
    uids = ["a", "b", "a", "c", "b", "c"]
    correct = [True, False, True, False, False, True]
    metrics = group_metrics(correct, uids, [False, False, False, True, False, True])
    assert metrics == {
        "filter/num_groups": 3,
        "filter/num_groups_removed": 2,
        "batch/solve_none": 1,
        "batch/solve_all": 1,
        "batch/solved": 3 / 6,
        # Only "c" stays.
        "batch/failed": 1 / 2,
        "batch/on_solved": 3 / 6,
    }
    marks = [True, False, False, False, False, True]
    with_demonstrations = group_metrics(correct, uids, [True] * 6, demonstrated=marks)
    assert with_demonstrations == metrics | {
        "filter/num_groups_removed": 0,
        "batch/failed": 3 / 6,
        "batch/on_solved": 1 / 4,
        "batch/off_solved": 2 / 2,
    }
    assert set(group_metrics([], [], []).values()) == {0.0}


@given(
    rows=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-4, 4), st.booleans()), min_size=1, max_size=12),
    count=st.booleans(),
    data=st.data(),
)
def test_permuting_rows_permutes_the_answer(
    rows: list[tuple[str, int, bool]], count: bool, data: st.DataObject
) -> None:
    cfg = FilterConfig(uniform_scores=(0.0, 1.0), count_demonstrations=count)
    order = data.draw(st.permutations(range(len(rows))))

    def keep(given_rows: list[tuple[str, int, bool]]) -> tuple[bool, ...]:
        uids, scores, marks = zip(*given_rows, strict=True)
        return kept_rows([s / 4 for s in scores], uids, cfg, demonstrated=marks)

    plain = keep(rows)
    assert keep([rows[i] for i in order]) == tuple(plain[i] for i in order)
    for uid, *_ in rows:
        assert len({k for k, row in zip(plain, rows, strict=True) if row[0] == uid}) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_must_be_finite(bad: float) -> None:
    with pytest.raises(DataError, match=r"score of group 'a': got (nan|inf), expected a finite number"):
        kept_rows([0.0, bad], ["a", "a"], STRICT)


def test_a_group_of_one_cannot_be_judged_by_its_mean() -> None:
    with pytest.raises(DataError, match=r"group 'b': got 1 row, expected all samples of the prompt, at least 2"):
        kept_rows([0.0, 1.0, 1.0], ["a", "a", "b"], STRICT)


@pytest.mark.parametrize(
    ("cfg", "num_samples", "message"),
    [
        (STRICT, 1, r"algo\.filter: got rollout\.num_samples=1, expected at least 2"),
        (FilterConfig(uniform_scores=(0.0,)), 1, r"raise rollout\.num_samples or take algo\.filter away"),
        (FilterConfig(max_refills=3), 8, r"algo\.filter\.max_refills: got 3 without a filter"),
    ],
)
def test_conflicts(cfg: FilterConfig, num_samples: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_filter(cfg, num_samples=num_samples)


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (0.5, 0.5)])
def test_bounds_that_keep_no_group(bounds: tuple[float, float]) -> None:
    message = rf"algo\.filter\.mean_score: got {re.escape(str(list(bounds)))}, expected lower < upper bound, both excl"
    with pytest.raises(ConfigError, match=message):
        check_values(FilterConfig(mean_score=bounds), ("algo.filter",), "algo.filter")


def test_the_number_that_decides() -> None:
    rewards = [Reward(score=-1.0, correct=False, own_score=0.0), Reward(score=0.5, correct=True)]
    got = [filter_scores(rewards, FilterConfig(by=by)) for by in ("correct", "score", "reward")]  # type: ignore[arg-type]
    assert got == [[0.0, 1.0], [0.0, 0.5], [-1.0, 0.5]]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (FilterConfig(mean_score=(-1.0, 1.0)), r"mean_score: got \[-1\.0, 1\.0\].*'b' lie in \[0, 1\]"),
        (FilterConfig(uniform_scores=(0.0, -1.0)), r"uniform_scores: got \[0\.0, -1\.0\].*by=correct"),
    ],
)
def test_numbers_that_no_sample_has_are_refused(cfg: FilterConfig, message: str) -> None:
    check_filter_ranges(cfg, {"a": (-1.0, 1.0)})
    with pytest.raises(ConfigError, match=message):
        check_filter_ranges(cfg, {"a": (-1.0, 1.0), "b": (0.0, 1.0)})


def test_accepted() -> None:
    check_filter(FilterConfig(), num_samples=1)
    check_filter(FilterConfig(mean_score=(0.0, 1.0), max_refills=2), num_samples=2)
    check_filter(FilterConfig(uniform_scores=(0.0, 1.0)), num_samples=8)
