"""The area under the ROC curve, against areas counted by hand."""

from typing import Any

import numpy as np
import pytest

from megarl_lab.study.roc import area_under_roc


def area(scores: list[float], positive: list[int], groups: list[int] | None = None, num_draws: int = 0) -> Any:
    return area_under_roc(
        np.array(scores),
        np.array(positive, dtype=bool),
        np.array(groups if groups is not None else range(len(scores))),
        num_draws=num_draws,
        seed=0,
    )


@pytest.mark.parametrize(
    ("scores", "positive", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 3, 2, 4], [0, 0, 1, 1], 0.75),  # of the four pairs, 2 > 3 is the wrong one
        ([5, 5, 5], [1, 0, 0], 0.5),  # equal scores count half
        ([1, 2, 2], [0, 0, 1], 0.75),
        ([-np.inf, 0.0, np.inf], [0, 0, 1], 1.0),
    ],
)
def test_areas_by_hand(scores: list[float], positive: list[int], expected: float) -> None:
    assert area(scores, positive).value == expected


def test_one_kind_alone_has_no_area() -> None:
    assert area([1.0, 2.0], [1, 1]) is None
    assert area([1.0, 2.0], [0, 0]) is None


def test_the_error_is_that_of_groups() -> None:
    """A hundred copies of a token tell no more than one: the error is that of 40 groups, not of 4000 tokens."""
    rng = np.random.default_rng(1)
    scores = rng.normal(size=40) + np.repeat([0.0, 1.0], 20)
    positive, groups = np.repeat([0, 1], 20), np.arange(40)
    once = area(scores.tolist(), positive.tolist(), groups.tolist(), 400)
    copied = area(*(np.repeat(x, 100).tolist() for x in (scores, positive, groups)), num_draws=400)
    assert copied.value == pytest.approx(once.value)
    assert copied.std_error == pytest.approx(once.std_error)
    # Hanley and McNeil (1982): the standard error of an area A from n and m independent values.
    a, n, m = once.value, 20, 20
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    expected = np.sqrt((a * (1 - a) + (n - 1) * (q1 - a * a) + (m - 1) * (q2 - a * a)) / (n * m))
    assert once.std_error == pytest.approx(expected, rel=0.3)
