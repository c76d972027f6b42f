"""Estimate advantages of the turns of conversations, from the rewards that follow each turn."""

import torch
from torch import Tensor

from megarl.algos.advantages.estimator import ADVANTAGE_ESTIMATORS, Estimate
from megarl.algos.masked import group_index
from megarl.algos.token_rewards import returns_to_go, token_rewards
from megarl.config.algo import AdvantageConfig
from megarl.types import ScoredBatch


def turn_numbers(loss_mask: Tensor) -> Tensor:
    """Return the number of each loss token's turn, [B, T] from 0, and −1 elsewhere; a turn is a run of loss tokens.

    >>> turn_numbers(torch.tensor([[True, True, False, True, False]])).tolist()
    [[0, 0, -1, 1, -1]]
    """
    before = torch.nn.functional.pad(loss_mask, (1, 0))[:, :-1]
    return torch.where(loss_mask, (loss_mask & ~before).cumsum(-1) - 1, -1)


@ADVANTAGE_ESTIMATORS.register("turn_returns", options=("gamma",), min_group=2)
def turn_returns(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute A_k = G_k − mean of G_k over the group's other samples that reached turn k, for all tokens of turn k.

    G_k = Σ_{j≥k} γ^{j−k}·r_j, with r_j the sum of the turn's token rewards (`token_rewards`). The baseline is 0 where
    no other sample reached the turn. It does not depend on what the sample did, so the estimate of the policy gradient
    is unbiased; a baseline of the rewards of single turns, summed afterwards, is not.

    >>> mask = [[1, 0, 1], [1, 0, 1]]
    >>> batch = step("aa", [1.0, 0.0], mask, turn_rewards=[[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]])
    >>> turn_returns(batch, AdvantageConfig(estimator="turn_returns")).advantages.tolist()
    [[1.0, 0.0, 0.75], [-1.0, 0.0, -0.75]]
    """
    mask, turns = batch.loss_mask, turn_numbers(batch.loss_mask)
    num_turns = int(turns.max().item()) + 1 if turns.numel() else 0
    if num_turns == 0:
        return Estimate(advantages=torch.zeros_like(mask, dtype=torch.float64))
    index = turns.clamp(min=0)
    rewards = torch.zeros(len(mask), num_turns, dtype=torch.float64, device=mask.device)
    rewards = rewards.scatter_add(1, index, torch.where(mask, token_rewards(batch), 0.0))
    reached = torch.zeros_like(rewards).scatter_add(1, index, mask.double()) > 0
    returns = torch.where(reached, returns_to_go(rewards, cfg.gamma), 0.0)
    group, num_groups = group_index(batch.uids, mask.device)
    sums = torch.zeros(num_groups, num_turns, dtype=torch.float64, device=mask.device).index_add(0, group, returns)
    counts = torch.zeros_like(sums).index_add(0, group, reached.double())
    others = (sums[group] - returns) / (counts[group] - 1).clamp(min=1)
    advantages = torch.where(mask, (returns - others).gather(1, index), 0.0)
    return Estimate(advantages=advantages)
