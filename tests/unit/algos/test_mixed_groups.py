"""What happens to groups that mix demonstrations and samples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.mixed_groups import mixed_metrics, unneeded_demonstrations, weight_advantages
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


def test_prefix_reward_positive_and_truncation() -> None:
    batch = make(["a", "b", "a", "a"], [True] * 4, [[1.0, 0.0]] * 4, truncated=[False, False, True, False])
    advantages = torch.full((4, 2), -2.0, dtype=torch.float64)
    # The group of a has 3 rows, that of b one.
    cfg = OffPolicyConfig(prefix_reward=6.0, drop_truncated=True, demonstration_weight=0.5)
    assert weight_advantages(advantages, batch, cfg).tolist() == [[1.0, -2.0], [3.0, -2.0], [0.0, 0.0], [1.0, -2.0]]
    assert weight_advantages(advantages, batch, OffPolicyConfig(only_positive=True)).tolist() == [[0.0, -2.0]] * 4


def test_a_group_that_succeeds_alone_needs_no_demonstration() -> None:
    uids = ["a", "a", "a", "b", "b", "b", "c", "c"]
    # Own samples: a is right once in two, b twice in two, c has none.
    correct = [True, True, False, False, True, True, True, True]
    off, on = [1.0, 0.0], [0.0, 0.0]
    batch = make(uids, correct, [off, on, on, off, on, on, off, off])
    assert unneeded_demonstrations(batch, 0.5).tolist() == [False] * 3 + [True, False, False] + [False] * 2
    assert unneeded_demonstrations(batch, 0.4).tolist() == [True, False, False, True] + [False] * 4


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
