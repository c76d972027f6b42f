"""Advantages of turns: by hand, and unbiased by enumeration of all conversations of a small policy."""

from collections.abc import Callable

import pytest
import torch

from megarl.algos.advantages import compute_advantages
from megarl.algos.token_rewards import TURN_REWARDS, token_rewards
from megarl.config.algo import AdvantageConfig
from megarl.types import ScoredBatch

MakeScored = Callable[..., ScoredBatch]


def test_by_hand(make_scored: MakeScored) -> None:
    """Two turns of two tokens and of one, a hole between them; the third sample has one turn."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
    earned = torch.tensor([[0, 0.5, 9, 1.0], [0, 0, 9, 2.0], [0, 0.25, 9, 9]], dtype=torch.float64)
    # The judges gave the first sample 1 more than its turns earned; the others what they earned.
    batch = make_scored(["q"] * 3, [2.5, 2.0, 0.25], mask, **{TURN_REWARDS: earned})
    got = compute_advantages(batch, AdvantageConfig(estimator="turn_returns", gamma=0.5)).advantages
    # G_0 = 0.5 + 2/2 = 1.5, 0 + 2/2 = 1 and 0.25; G_1 = 2 and 2.
    first = [1.5 - (1 + 0.25) / 2, 1 - (1.5 + 0.25) / 2, 0.25 - (1.5 + 1) / 2]
    second = [2 - 2, 2 - 2, 0]
    expected = [[a, a, 0, b] for a, b in zip(first, second, strict=True)]
    assert got.tolist() == [pytest.approx(row) for row in expected]


def test_token_rewards_add_up_to_the_reward_wherever_turns_earned_it(make_scored: MakeScored) -> None:
    mask = torch.tensor([[1, 0, 1, 1]], dtype=torch.bool)
    earned = torch.tensor([[0.5, 7.0, 0.0, 0.25]], dtype=torch.float64)
    batch = make_scored(["q"], [1.0], mask, **{TURN_REWARDS: earned})
    assert token_rewards(batch).tolist() == [[0.5, 0.0, 0.0, 0.5]]
