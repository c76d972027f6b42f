"""Estimate advantages by comparing the samples of a prompt (a group): all loss tokens of a sample get the same number.

The reward r is a sample's reward minus its KL penalty. In a group of one sample, mean_group is 0 and std_group is 1.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from megarl.algos.advantages.estimator import ADVANTAGE_ESTIMATORS, Estimate, Estimator
from megarl.algos.masked import GroupStats, group_stats
from megarl.algos.mixed_groups import demonstration_mask
from megarl.algos.token_rewards import sequence_rewards
from megarl.config.algo import AdvantageConfig
from megarl.errors import DataError
from megarl.types import ScoredBatch

# Makes groups of equal rewards give 0 instead of 0/0; small compared with the spread of rewards that carry a signal.
_STD_EPS = 1e-6
_GROUP_NORM_EPS = 1e-9

# Rewards of a group with a smaller deviation count as equal; rounding alone leaves about 1e-16.
EQUAL_REWARDS_STD = 1e-8

RowEstimator: TypeAlias = Callable[[ScoredBatch, AdvantageConfig], Tensor]


def _register(name: str, *options: str) -> Callable[[RowEstimator], RowEstimator]:
    """Register an estimator that returns one float64 number per row, [B]; for `options` see `Estimator`."""

    def add(rows: RowEstimator) -> RowEstimator:
        def raw(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
            return Estimate(advantages=torch.where(batch.loss_mask, rows(batch, cfg)[:, None], 0.0))

        ADVANTAGE_ESTIMATORS.register(name)(Estimator(raw=raw, options=frozenset(options), min_group=2))
        return rows

    return add


def centred(rewards: Tensor, stats: GroupStats) -> Tensor:
    """Return the rewards [B], each minus the mean reward of its group.

    >>> centred(tensor([1.0, 0.0]), group_stats(tensor([1.0, 0.0]), "aa")).tolist()
    [0.5, -0.5]
    """
    return rewards - torch.where(stats.size == 1, 0.0, stats.mean)


def _deviation(stats: GroupStats) -> Tensor:
    return torch.where(stats.size == 1, 1.0, stats.std)


@_register("grpo", "norm_by_std")
def grpo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute GRPO's A = (r − mean_group) / (std_group + 1e-6), with the unbiased deviation (arXiv:2402.03300).

    Without `norm_by_std`, A = r − mean_group (Dr. GRPO, arXiv:2503.20783).

    >>> grpo(step("aa", [1.0, 0.0]), AdvantageConfig()).round(decimals=2).tolist()
    [0.71, -0.71]
    """
    rewards = sequence_rewards(batch)
    stats = group_stats(rewards, batch.uids)
    difference = centred(rewards, stats)
    return difference / (_deviation(stats) + _STD_EPS) if cfg.norm_by_std else difference


@_register("grpo_split", "norm_by_std")
def grpo_split(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute GRPO's A with mean and deviation over rows without demonstration tokens (LUFFY, arXiv:2504.14945).

    A deviation of 0 is replaced by 1: a row with a demonstration then still differs from a group of equal rewards. If
    all rows of a group have demonstrations, all of them are used. `norm_by_std` acts as in `grpo`.

    >>> batch = step("aaa", [1.0, 0.0, 1.0], demonstration=[[1.0], [0.0], [0.0]])
    >>> grpo_split(batch, AdvantageConfig()).round(decimals=2).tolist()
    [0.71, -0.71, 0.71]
    """
    rewards = sequence_rewards(batch)
    on_policy = group_stats(rewards, batch.uids, where=~demonstration_mask(batch).any(dim=-1))
    every = group_stats(rewards, batch.uids)
    fall_back = on_policy.size == 0
    stats = GroupStats(
        size=torch.where(fall_back, every.size, on_policy.size),
        mean=torch.where(fall_back, every.mean, on_policy.mean),
        std=torch.where(fall_back, every.std, on_policy.std),
    )
    difference = centred(rewards, stats)
    deviation = torch.where(stats.std < EQUAL_REWARDS_STD, 1.0, stats.std)
    return difference / (deviation + _STD_EPS) if cfg.norm_by_std else difference


@_register("dr_grpo")
def dr_grpo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute Dr. GRPO's A = r − mean_group (arXiv:2503.20783).

    >>> dr_grpo(step("aa", [1.0, 0.0]), AdvantageConfig()).tolist()
    [0.5, -0.5]
    """
    rewards = sequence_rewards(batch)
    return centred(rewards, group_stats(rewards, batch.uids))


@_register("group_norm")
def group_norm(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute GRPO's advantage with OpenRLHF's constant 1e-9: A = (r − mean_group) / (std_group + 1e-9).

    >>> group_norm(step("aa", [1.0, 0.0]), AdvantageConfig()).round(decimals=2).tolist()
    [0.71, -0.71]
    """
    rewards = sequence_rewards(batch)
    stats = group_stats(rewards, batch.uids)
    return centred(rewards, stats) / (_deviation(stats) + _GROUP_NORM_EPS)


def leave_one_out(rewards: Tensor, stats: GroupStats) -> Tensor:
    """Return the rewards [B], each minus the mean reward of the n − 1 other rows of its group: n/(n − 1)·(r − mean).

    >>> leave_one_out(tensor([1.0, 0.0]), group_stats(tensor([1.0, 0.0]), "aa")).tolist()
    [1.0, -1.0]
    """
    return centred(rewards, stats) * stats.size / (stats.size - 1).clamp(min=1)


@_register("rloo")
def rloo(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute RLOO's A_i = r_i − (Σ r − r_i)/(n − 1) over the n rows of a group (arXiv:2402.14740).

    >>> rloo(step("aaa", [1.0, 0.0, 0.0]), AdvantageConfig()).tolist()
    [1.0, -0.5, -0.5]
    """
    rewards = sequence_rewards(batch)
    return leave_one_out(rewards, group_stats(rewards, batch.uids))


@_register("maxrl")
def maxrl(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Compute MaxRL's A = (r − mean_group) / mean_group, or 0 in a group whose mean is 0 (arXiv:2602.02710).

    For r ∈ {0, 1}, mean_group estimates the probability p of success. A then gives the gradient of log p, not of p.
    A group of one row has A = 0. Raises DataError for a negative reward, because mean_group is then no probability.

    >>> maxrl(step("aa", [1.0, 0.0]), AdvantageConfig()).tolist()
    [1.0, -1.0]
    """
    rewards = sequence_rewards(batch)
    negative = (rewards < 0).nonzero().flatten().tolist()
    if negative:
        i = negative[0]
        raise DataError(
            f"reward of row {i} (uid {batch.uids[i]!r}): got {rewards[i].item()}, expected >= 0 with "
            f"algo.advantage.estimator=maxrl; use a scorer of 0 and 1, or another estimator"
        )
    mean = group_stats(rewards, batch.uids).mean
    return torch.where(mean > 0, (rewards - mean) / torch.where(mean > 0, mean, 1.0), 0.0)
