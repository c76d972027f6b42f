"""Spread, Welch's test and Holm's correction against hand-computed numbers and printed tables."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl_lab.comparison.statistics import Spread, difference_of, holm, paired_difference, spread_of, two_sided_p


def test_spread() -> None:
    """Deviations -4, -1, 5 from the mean 7: squares sum to 42, over 2."""
    assert spread_of([3, 6, 12]) == Spread(count=3, mean=7, std=math.sqrt(21), min=3, max=12)


def test_spread_of_one_value() -> None:
    assert spread_of([0.5]) == Spread(count=1, mean=0.5, std=None, min=0.5, max=0.5)


@pytest.mark.parametrize(
    ("t", "dof"), [(12.706, 1), (4.303, 2), (3.182, 3), (2.776, 4), (2.228, 10), (2.042, 30), (1.984, 100)]
)
def test_two_sided_p_at_the_printed_five_percent_points(t: float, dof: float) -> None:
    assert two_sided_p(t, dof) == pytest.approx(0.05, abs=5e-5)
    assert two_sided_p(-t, dof) == two_sided_p(t, dof)


@given(st.floats(0, 50))
def test_two_sided_p_in_closed_form(t: float) -> None:
    """dof 1: 1 − 2/π · arctan t. dof 2: 1 − t/√(2 + t²)."""
    assert two_sided_p(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), abs=1e-9)
    assert two_sided_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-9)


def test_welch_with_equal_variances() -> None:
    """s = 0.04 and n = 3 in both: error √(2 · 0.0016 / 3), dof 4, where P(|T| > t) = 1 − sin θ (1 + cos²θ / 2) with
    tan θ = t/2 (Abramowitz and Stegun 26.7.4)."""
    found = difference_of(spread_of([0.80, 0.84, 0.88]), spread_of([0.90, 0.94, 0.98]))
    assert found.mean == pytest.approx(-0.10)
    assert found.std_error == pytest.approx(0.0326599, abs=1e-7)
    theta = math.atan(0.10 / 0.0326599 / 2)
    assert found.p_value == pytest.approx(1 - math.sin(theta) * (1 + math.cos(theta) ** 2 / 2), abs=1e-5)


def test_welch_with_one_group_that_does_not_vary() -> None:
    """Only the other group's two seeds count: v = 0.02/2, so dof = 1 and t = 0.3/0.1 = 3."""
    found = difference_of(spread_of([0.9, 0.7]), spread_of([0.5, 0.5]))
    assert found.std_error == pytest.approx(0.1)
    assert found.p_value == pytest.approx(1 - 2 / math.pi * math.atan(3))


def test_no_test_without_spread() -> None:
    one, two, same = spread_of([0.5]), spread_of([0.4, 0.6]), spread_of([0.7, 0.7])
    assert (difference_of(one, two).std_error, difference_of(one, two).p_value) == (None, None)
    assert (difference_of(two, one).std_error, difference_of(two, one).p_value) == (None, None)
    assert (difference_of(same, same).std_error, difference_of(same, same).p_value) == (0.0, None)


def test_pairs() -> None:
    """Differences 1, 2, 3: mean 2, sd 1, t = 2√3. With 2 degrees of freedom p = 1 − t/√(t² + 2)."""
    found = paired_difference([(11.0, 10.0), (22.0, 20.0), (33.0, 30.0)])
    assert (found.mean, found.std_error) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert found.p_value == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-6)
    one, same = paired_difference([(1.0, 0.5)]), paired_difference([(1.0, 0.5), (2.0, 1.5)])
    assert (one.std_error, one.p_value, same.std_error, same.p_value) == (None, None, 0.0, None)


def test_holm() -> None:
    """0.01 · 3, then max(0.03, 0.02 · 2), then max(0.04, 0.3)."""
    assert holm([0.02, 0.3, 0.01]) == pytest.approx([0.04, 0.3, 0.03])
    # 0.03 · 3 = 0.09 holds the next ones up; nothing exceeds 1.
    assert holm([0.03, 0.04, 0.05]) == pytest.approx([0.09, 0.09, 0.09])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_between_the_p_value_and_bonferroni(p_values: list[float]) -> None:
    for p, adjusted in zip(p_values, holm(p_values), strict=True):
        assert p <= adjusted <= min(1.0, p * len(p_values))
