"""Mixtures by hand."""

import math

import pytest

from megarl.errors import ConfigError
from megarl.rewards.hybrid import TRANSFORMS, Summand, UntransformedRewards, mix

GROUPS = ["a", "a", "a", "b", "b"]


def transformed(name: str, values: list[float], *, groups: list[str] | None = None, **options: object) -> list[float]:
    raw = UntransformedRewards(values=values, groups=groups or ["a"] * len(values))
    return TRANSFORMS.get(name)(raw, Summand(transform=name, **options))  # type: ignore[arg-type]


def test_identity_and_clip() -> None:
    assert transformed("identity", [-3.0, 0.5]) == [-3.0, 0.5]
    assert transformed("clip", [-3.0, -1.0, 0.5, 9.0], clip=(-1.0, 2.0)) == [-1.0, -1.0, 0.5, 2.0]


def test_sigmoid_of_any_number() -> None:
    # 1/(1 + e^−ln3) = 3/4.
    assert transformed("sigmoid", [0.0, math.log(3), -math.log(3)]) == pytest.approx([0.5, 0.75, 0.25], abs=1e-15)
    assert transformed("sigmoid", [1e6, -1e6]) == [1.0, 0.0]


def test_batch_zscore() -> None:
    # Mean 2, variance (1 + 0 + 1) / 2 = 1.
    assert transformed("batch_zscore", [1.0, 2.0, 3.0]) == pytest.approx([-1.0, 0.0, 1.0], abs=2e-6)
    assert transformed("batch_zscore", [5.0]) == [0.0]
    assert transformed("batch_zscore", [5.0, 5.0]) == [0.0, 0.0]
    assert transformed("batch_zscore", []) == []


def test_group_zscore_keeps_groups_apart() -> None:
    # a: 0, 3, 6, mean 3, std 3. b: 10, 14, mean 12, std √8.
    found = transformed("group_zscore", [0.0, 10.0, 3.0, 14.0, 6.0], groups=["a", "b", "a", "b", "a"])
    assert found == pytest.approx([-1.0, -2 / math.sqrt(8), 0.0, 2 / math.sqrt(8), 1.0], abs=2e-6)
    assert transformed("group_zscore", [7.0, 1.0, 3.0], groups=["a", "b", "b"])[0] == 0.0


def test_a_mixture_is_the_weighted_sum_of_what_judged_a_row() -> None:
    rewards = {
        "rule": {0: 1.0, 1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0},
        "judge": {0: 4.0, 1: -9.0, 2: 0.5},
        "model": {0: 2.0, 1: 4.0, 2: 6.0, 3: 1.0, 4: 3.0},
    }
    summands = {
        "rule": Summand(weight=2.0),
        "judge": Summand(weight=-0.5, transform="clip", clip=(-1.0, 1.0)),
        "model": Summand(weight=0.1, transform="group_zscore"),
    }
    # model: a has mean 4, std 2: −1, 0, 1. b has mean 2, std √2: ∓1/√2.
    expected = {
        0: 2.0 - 0.5 - 0.1,
        1: 0.0 + 0.5 + 0.0,
        2: 0.0 - 0.25 + 0.1,
        3: 2.0 - 0.1 / math.sqrt(2),
        4: 0.0 + 0.1 / math.sqrt(2),
    }
    assert mix(rewards, summands, GROUPS) == pytest.approx(expected, abs=1e-6)


def test_zscores_are_over_the_rows_that_the_part_judged() -> None:
    summands = {"model": Summand(transform="batch_zscore")}
    assert mix({"model": {3: 0.0, 1: 2.0}}, summands, GROUPS) == pytest.approx(
        {3: -1 / math.sqrt(2), 1: 1 / math.sqrt(2)}, abs=1e-6
    )


def test_unknown_transform() -> None:
    with pytest.raises(ConfigError, match="unknown transform 'softmax'"):
        TRANSFORMS.get("softmax")
