"""Advantages of turns: by hand, and unbiased by enumeration of all conversations of a small policy."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

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


def test_a_turn_that_nobody_else_reached_has_no_baseline(make_scored: MakeScored) -> None:
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]], dtype=torch.bool)
    batch = make_scored(["q", "q"], [1.0, 0.5], mask)
    got = compute_advantages(batch, AdvantageConfig(estimator="turn_returns")).advantages
    assert got.tolist() == [[0.5, 0, 1.0], [-0.5, 0, 0]]


def test_without_loss_tokens_there_is_nothing(make_scored: MakeScored) -> None:
    batch = make_scored(["q", "q"], [1.0, 0.5], torch.zeros(2, 3, dtype=torch.bool))
    assert not compute_advantages(batch, AdvantageConfig(estimator="turn_returns")).advantages.any()


def test_token_rewards_add_up_to_the_reward_wherever_turns_earned_it(make_scored: MakeScored) -> None:
    mask = torch.tensor([[1, 0, 1, 1]], dtype=torch.bool)
    earned = torch.tensor([[0.5, 7.0, 0.0, 0.25]], dtype=torch.float64)
    batch = make_scored(["q"], [1.0], mask, **{TURN_REWARDS: earned})
    assert token_rewards(batch).tolist() == [[0.5, 0.0, 0.0, 0.5]]


# A policy of two decisions: to stop (and earn 1) or to go on, with probability σ(θ₀); then one of two answers, the
# first with probability σ(θ₁). It earns 3, the other one nothing; going on earns nothing by itself.
THETA = (0.3, -0.4)


@dataclass(frozen=True, kw_only=True)
class Talk:
    """One way in which the conversation can go: its probability, the reward of each turn, and ∇log π of each turn."""

    prob: float
    rewards: tuple[float, ...]
    grads: tuple[tuple[float, float], ...]


def talks() -> list[Talk]:
    go, first = (1 / (1 + math.exp(-theta)) for theta in THETA)
    return [
        Talk(prob=1 - go, rewards=(1.0,), grads=((-go, 0.0),)),
        Talk(prob=go * first, rewards=(0.0, 3.0), grads=((1 - go, 0.0), (0.0, 1 - first))),
        Talk(prob=go * (1 - first), rewards=(0.0, 0.0), grads=((1 - go, 0.0), (0.0, -first))),
    ]


def groups(size: int) -> Iterator[tuple[float, Sequence[Talk]]]:
    for group in itertools.product(talks(), repeat=size):
        yield math.prod(talk.prob for talk in group), group


def expected_gradient(advantages: Callable[[Sequence[Talk]], Sequence[Sequence[float]]], size: int = 3) -> list[float]:
    """The mean over all groups of Σ A_k·∇log π of turn k, divided by the number of samples."""
    total = [0.0, 0.0]
    for prob, group in groups(size):
        for talk, of_turns in zip(group, advantages(group), strict=True):
            for grad, advantage in zip(talk.grads, of_turns, strict=True):
                for i in range(2):
                    total[i] += prob * advantage * grad[i] / size
    return total


def true_gradient() -> list[float]:
    """∇ of the expected sum of rewards, Σ P·R·∇log P."""
    return [
        sum(talk.prob * sum(talk.rewards) * sum(grad[i] for grad in talk.grads) for talk in talks()) for i in range(2)
    ]


def of_the_estimator(group: Sequence[Talk]) -> list[list[float]]:
    """A turn is one token, with a hole after the first."""
    mask = torch.tensor([[True, False, len(talk.rewards) > 1] for talk in group])
    earned = torch.tensor([[talk.rewards[0], 0.0, sum(talk.rewards[1:])] for talk in group], dtype=torch.float64)
    batch = ScoredBatch(
        uids=("q",) * len(group),
        rewards=earned.sum(-1),
        correct=torch.zeros(len(group), dtype=torch.bool),
        loss_mask=mask,
        quantities={TURN_REWARDS: earned},
    )
    got: Tensor = compute_advantages(batch, AdvantageConfig(estimator="turn_returns")).advantages
    return [[row[0], row[2]][: len(talk.rewards)] for row, talk in zip(got.tolist(), group, strict=True)]


def normalised_by_turn(group: Sequence[Talk]) -> list[list[float]]:
    """Rewards of each turn minus the mean of the others that reached it, then summed over the turns that follow."""
    centred: list[list[float]] = []
    for i, talk in enumerate(group):
        row = []
        for k, reward in enumerate(talk.rewards):
            others = [each.rewards[k] for j, each in enumerate(group) if j != i and len(each.rewards) > k]
            row.append(reward - (sum(others) / len(others) if others else 0.0))
        centred.append(row)
    return [[sum(row[k:]) for k in range(len(row))] for row in centred]


def test_the_policy_gradient_is_unbiased_and_that_of_rewards_centred_by_turn_is_not() -> None:
    expected = true_gradient()
    assert expected_gradient(of_the_estimator) == pytest.approx(expected, abs=1e-12)
    # Centring each turn's reward makes a second turn seem to earn nothing on average, so that going on is discouraged.
    biased = expected_gradient(normalised_by_turn)
    assert biased[1] == pytest.approx(expected[1], abs=1e-12)
    assert biased[0] < expected[0] - 0.1
