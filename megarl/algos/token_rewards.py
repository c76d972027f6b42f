"""Assign rewards to tokens: a turn's reward goes to its last token, the rest of a row's reward to its last loss token,
and the KL penalty to every loss token.
"""

from megarl.algos.masked import masked_sum
from megarl.config.torch_later import Tensor, torch
from megarl.types import ScoredBatch

# Name of the quantity that holds coefficient × KL of every token.
KL_PENALTY = "kl_penalty"
# Name of the quantity that holds what environments gave for turns, on the last token of each.
TURN_REWARDS = "turn_rewards"


def last_token(loss_mask: Tensor) -> Tensor:
    """Return [B, T] bool, true on the last loss token of each row that has one.

    >>> last_token(tensor([[True, True, False]])).tolist()
    [[False, True, False]]
    """
    return loss_mask & (loss_mask.flip(-1).cumsum(-1).flip(-1) == 1)


def place_reward(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Return [B, T]: each row's reward on its last loss token, else 0; without loss tokens the reward is lost.

    >>> place_reward(tensor([2.0]), tensor([[True, True, False]])).tolist()
    [[0.0, 2.0, 0.0]]
    """
    return torch.where(last_token(loss_mask), rewards[:, None], 0.0)


def kl_penalty(batch: ScoredBatch) -> Tensor:
    """Return the KL penalty β·KL per token, float64 [B, T]. It is 0 outside the loss mask, or if none is configured.

    >>> kl_penalty(step("a", [1.0], [[1, 0]], kl_penalty=[[0.5, 9.0]])).tolist()
    [[0.5, 0.0]]
    """
    if KL_PENALTY not in batch.quantities:
        return torch.zeros_like(batch.loss_mask, dtype=torch.float64)
    return torch.where(batch.loss_mask, batch.quantities[KL_PENALTY].double(), 0.0)


def unplaced_rewards(batch: ScoredBatch) -> Tensor:
    """Return float64 [B]: what each row's reward has besides the rewards of its turns.

    >>> unplaced_rewards(step("a", [1.0], [[1, 0, 1]], turn_rewards=[[0.25, 0.0, 0.5]])).tolist()
    [0.25]
    """
    rewards = batch.rewards.double()
    if TURN_REWARDS not in batch.quantities:
        return rewards
    return rewards - masked_sum(batch.quantities[TURN_REWARDS].double(), batch.loss_mask, dim=-1)


def token_rewards(batch: ScoredBatch) -> Tensor:
    """Return float64 [B, T], whose sum is the row's reward minus its KL penalties.

    Rewards of turns are where the environment gave them, and the last loss token has the difference to the row's
    reward: the environment says when something was earned, judges say how much in all.

    >>> token_rewards(step("a", [1.0], kl_penalty=[[0.5, 0.25]])).tolist()
    [[-0.5, 0.75]]
    >>> token_rewards(step("a", [1.0], [[1, 0, 1]], turn_rewards=[[0.25, 0.0, 0.5]])).tolist()
    [[0.25, 0.0, 0.75]]
    """
    placed = place_reward(unplaced_rewards(batch), batch.loss_mask)
    if TURN_REWARDS in batch.quantities:
        placed = placed + torch.where(batch.loss_mask, batch.quantities[TURN_REWARDS].double(), 0.0)
    return placed - kl_penalty(batch) if KL_PENALTY in batch.quantities else placed


def sequence_rewards(batch: ScoredBatch) -> Tensor:
    """Return each row's reward minus the sum of its KL penalties, float64 [B]; without loss tokens, just the reward.

    >>> sequence_rewards(step("a", [1.0], kl_penalty=[[0.5, 0.25]])).tolist()
    [0.25]
    """
    rewards = batch.rewards.double()
    if KL_PENALTY not in batch.quantities:
        return rewards
    return rewards - masked_sum(kl_penalty(batch), batch.loss_mask, dim=-1)


def returns_to_go(rewards: Tensor, discount: float | Tensor = 1.0) -> Tensor:
    """Return y_t = x_t + discount_t·y_{t+1} for token rewards x [B, T], with y = 0 after the last column.

    discount: one number, or one for each token.

    >>> returns_to_go(tensor([[1.0, 1.0, 1.0]]), 0.5).tolist()
    [[1.75, 1.5, 1.0]]
    """
    if not isinstance(discount, Tensor) and discount == 1:
        return rewards.flip(-1).cumsum(-1).flip(-1)
    factors = torch.as_tensor(discount, dtype=rewards.dtype).expand_as(rewards).t()
    columns = rewards.t().clone(memory_format=torch.contiguous_format)
    for t in range(len(columns) - 2, -1, -1):
        columns[t] += factors[t] * columns[t + 1]
    return columns.t()
