"""What happens to groups that mix demonstrations and samples."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.mixed_groups import kept_tokens, mixed_metrics, unneeded_demonstrations, weight_advantages
from megarl.config.algo import OffPolicyConfig
from megarl.types import ScoredBatch


def make(
    uids: list[str],
    correct: list[bool],
    demonstration: list[list[float]],
    truncated: list[bool] | None = None,
    mask: Tensor | None = None,
) -> ScoredBatch:
    marks = torch.tensor(demonstration, dtype=torch.float64)
    return ScoredBatch(
        uids=tuple(uids),
        rewards=torch.tensor(correct, dtype=torch.float64),
        correct=torch.tensor(correct),
        loss_mask=torch.ones_like(marks, dtype=torch.bool) if mask is None else mask,
        quantities={"demonstration": marks},
        truncated=None if truncated is None else torch.tensor(truncated),
    )


def test_weights_golden(golden: Any, check_golden: Any) -> None:
    case = golden("E.alpha_beta")
    batch = make(["q"], [True], case["inputs"]["prefix_mask"])
    cfg = OffPolicyConfig(demonstration_weight=case["params"]["alpha"], policy_weight=case["params"]["beta"])
    advantages = torch.tensor(case["inputs"]["adv"], dtype=torch.float64)
    check_golden(weight_advantages(advantages, batch, cfg), case["expected"], case)
    assert advantages.tolist() == case["inputs"]["adv"]


def test_by_default_nothing_changes() -> None:
    batch = make(["q", "q"], [True, False], [[1.0, 0.0], [0.0, 0.0]], truncated=[True, True])
    advantages = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    got = weight_advantages(advantages, batch, OffPolicyConfig())
    assert got.tolist() == advantages.tolist()
    assert got.dtype is torch.float32


def test_prefix_reward_positive_and_truncation() -> None:
    batch = make(["a", "b", "a", "a"], [True] * 4, [[1.0, 0.0]] * 4, truncated=[False, False, True, False])
    advantages = torch.full((4, 2), -2.0, dtype=torch.float64)
    # The group of a has 3 rows, that of b one.
    cfg = OffPolicyConfig(prefix_reward=6.0, drop_truncated=True, demonstration_weight=0.5)
    assert weight_advantages(advantages, batch, cfg).tolist() == [[1.0, -2.0], [3.0, -2.0], [0.0, 0.0], [1.0, -2.0]]
    assert weight_advantages(advantages, batch, OffPolicyConfig(only_positive=True)).tolist() == [[0.0, -2.0]] * 4


def test_outside_the_loss_mask_it_is_zero() -> None:
    batch = make(["q"], [True], [[1.0, 1.0, 0.0, 0.0]], mask=torch.tensor([[True, False, True, False]]))
    advantages = torch.tensor([[1.0, math.nan, 1.0, math.nan]])
    got = weight_advantages(advantages, batch, OffPolicyConfig(policy_weight=3.0))
    assert got.tolist() == [[1.0, 0.0, 3.0, 0.0]]


@given(st.permutations(range(5)))
def test_permuted_rows_keep_their_advantages(order: list[int]) -> None:
    uids, correct = ["a", "b", "a", "b", "a"], [True, False, False, True, True]
    marks = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    cfg = OffPolicyConfig(prefix_reward=2.0)
    advantages = torch.arange(10, dtype=torch.float64).view(5, 2)
    straight = weight_advantages(advantages, make(uids, correct, marks), cfg)
    batch = make([uids[i] for i in order], [correct[i] for i in order], [marks[i] for i in order])
    assert torch.equal(weight_advantages(advantages[order], batch, cfg), straight[order])


def test_tokens_above_a_probability_are_not_kept() -> None:
    old = torch.tensor([[0.9, 0.7, 0.5, 0.9]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, True, False]])
    assert kept_tokens(old, mask, 0.8).tolist() == [[False, True, True, False]]
    assert kept_tokens(old, mask, 1.0).tolist() == mask.tolist()


def test_a_group_that_succeeds_alone_needs_no_demonstration() -> None:
    uids = ["a", "a", "a", "b", "b", "b", "c", "c"]
    # Own samples: a is right once in two, b twice in two, c has none.
    correct = [True, True, False, False, True, True, True, True]
    off, on = [1.0, 0.0], [0.0, 0.0]
    batch = make(uids, correct, [off, on, on, off, on, on, off, off])
    assert unneeded_demonstrations(batch, 0.5).tolist() == [False] * 3 + [True, False, False] + [False] * 2
    assert unneeded_demonstrations(batch, 0.4).tolist() == [True, False, False, True] + [False] * 4


def test_a_group_at_the_bound_still_needs_its_demonstration() -> None:
    """5 of 8 own samples are correct, which is at most 0.625."""
    marks = [[1.0]] + [[0.0]] * 8
    batch = make(["a"] * 9, [True] * 6 + [False] * 3, marks)
    assert not unneeded_demonstrations(batch, 0.625).any()
    assert unneeded_demonstrations(batch, 0.624).tolist() == [True] + [False] * 8


def test_metrics() -> None:
    uids = ["a", "a", "b", "b", "c"]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]).bool()
    marks = [[1.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3, [0.0] * 3, [1.0, 0.0, 0.0]]
    batch = make(uids, [True, True, False, False, True], marks, mask=mask)
    assert mixed_metrics(batch) == pytest.approx(
        {
            "batch/demonstration_frac": 0.3,
            "on_off_metrics/on_score_mean": 1 / 3,
            "on_off_metrics/off_score_mean": 1.0,
            "on_off_metrics/on_response_tokens_mean": 2.0,
            "on_off_metrics/off_response_tokens_mean": 2.0,
        }
    )


def test_metrics_without_demonstrations_are_finite() -> None:
    metrics = mixed_metrics(make(["a"], [True], [[0.0, 0.0]]))
    assert metrics["on_off_metrics/off_score_mean"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
