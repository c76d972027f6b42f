"""Estimate advantages by REINFORCE, with baselines or without, then normalise them over the batch or the group.

An advantage is the sum of the rewards of a token and all later tokens. The last loss token gets the row's reward minus
the baseline of its group, if there is one, and every loss token a KL penalty.
"""

from dataclasses import replace

from megarl.algos.advantages.estimator import (
    ADVANTAGE_ESTIMATORS,
    GREEDY_SCORE,
    Estimate,
    required_detail,
)
from megarl.algos.advantages.group import ZERO, centred, equal_rewards, leave_one_out
from megarl.algos.masked import group_index, group_stats, masked_sum
from megarl.algos.token_rewards import returns_to_go, token_rewards
from megarl.config.algo import AdvantageConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import ScoredBatch

_MIN_VARIANCE = 1e-8

# Safeguards of `max_normalised`.
_EPS = 1e-8
_MAX_SCALE = 10.0
_MAX_NEGATIVE_SQUARES = 1e8


def _returns(batch: ScoredBatch, rewards: Tensor, gamma: float = 1.0) -> Estimate:
    """Compute the returns A_t = r_t + γ·A_{t+1} of token rewards, with `rewards` [B] in place of the batch's.

    Only loss tokens discount, as if the tokens between them did not exist.
    """
    discount = 1.0 if gamma == 1 else gamma ** batch.loss_mask.double()
    returns = returns_to_go(token_rewards(replace(batch, rewards=rewards)), discount)
    return Estimate(advantages=torch.where(batch.loss_mask, returns, 0.0))


def batch_whitened(advantages: Tensor, batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Scale advantages to (A − μ)·rsqrt(max(σ², 1e-8)), with mean μ and population variance σ² over all loss tokens.

    Long rows count more in μ. If length correlates with reward, μ is not 0, so groups of equal rewards are shifted too.
    Without `center`, μ is 0 and σ² is the mean of A². With `exclude_equal_groups`, μ and σ² ignore groups of equal
    rewards, and these are divided by σ but not shifted. Without `norm_by_std`, advantages are not divided.

    >>> batch_whitened(tensor([[0.5], [-0.5]]), step("aa", [1.0, 0.0]), AdvantageConfig()).tolist()
    [[1.0], [-1.0]]
    """
    counted = batch.loss_mask
    if cfg.exclude_equal_groups:
        counted = counted & ~equal_rewards(batch)[:, None]
    num_tokens = counted.sum().clamp(min=1)
    mean = masked_sum(advantages, counted) / num_tokens if cfg.center else advantages.new_zeros(())
    variance = masked_sum((advantages - mean).square(), counted) / num_tokens
    shifted = torch.where(counted, advantages - mean, advantages)
    if not (cfg.norm_by_std and counted.any()):
        return shifted
    return shifted * variance.clamp(min=_MIN_VARIANCE).rsqrt()


def max_normalised(advantages: Tensor, batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Scale positive A to α·A and negative A to β·A, so that the nonzero A of a group have sum 0 and mean square 1.

    S± and Q± are the sums of A and A² over the tokens of each sign, and N is the number of both. Then
    α = √(N / (Q⁺ + (S⁺/S⁻)²·Q⁻)) and β = −α·S⁺/S⁻. Safeguards: (S⁺/S⁻)²·Q⁻ ≤ 1e8, a denominator plus 1e-8, α and β in
    [1e-8, 10]. A group with |S⁺| or |S⁻| < 1e-8 is not scaled; with `uniform_scale`, nor is a group of equal rewards.

    >>> batch = step("aaa", [1.0, 0.0, 0.0])
    >>> advantages = tensor([[2.0], [-1.0], [-1.0]])
    >>> max_normalised(advantages, batch, AdvantageConfig()).round(decimals=2).tolist()
    [[1.41], [-0.71], [-0.71]]
    """
    index, num_groups = group_index(batch.uids, advantages.device)

    def group_sum(tokens: Tensor) -> Tensor:
        rows = tokens.double().sum(dim=-1)
        return rows.new_zeros(num_groups).index_add(0, index, rows)[index]

    positive, negative = advantages > ZERO, advantages < -ZERO
    sum_pos, sum_neg = group_sum(advantages * positive), group_sum(advantages * negative)
    has_both = (sum_pos >= _EPS) & (sum_neg <= -_EPS)
    if cfg.uniform_scale:
        has_both &= ~equal_rewards(batch)
    balance = torch.where(has_both, sum_pos / -sum_neg, 1.0)
    squares_neg = (balance.square() * group_sum(advantages.square() * negative)).clamp(max=_MAX_NEGATIVE_SQUARES)
    squares = group_sum(advantages.square() * positive) + squares_neg
    alpha = (group_sum(positive | negative) / (squares + _EPS)).sqrt()
    scale_pos = torch.where(has_both, alpha.clamp(_EPS, _MAX_SCALE), 1.0)[:, None]
    scale_neg = torch.where(has_both, (alpha * balance).clamp(_EPS, _MAX_SCALE), 1.0)[:, None]
    return advantages * torch.where(positive, scale_pos, torch.where(negative, scale_neg, 1.0))


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus", normalise=batch_whitened, options=("gamma", "norm_by_std"))
def reinforce_plus_plus(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute the raw advantages of REINFORCE++ (arXiv:2501.03262): returns of the reward r, discounted by γ.

    `batch_whitened` normalises them afterwards. Only the batch's mean is subtracted, so groups of one row are enough.

    >>> reinforce_plus_plus(step("a", [1.0], [[1, 1]]), AdvantageConfig(gamma=0.5)).advantages.tolist()
    [[0.5, 1.0]]
    """
    return _returns(batch, batch.rewards, cfg.gamma)


@ADVANTAGE_ESTIMATORS.register("remax", needs_greedy=True)
def remax(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute ReMax (arXiv:2310.10505): returns of r minus the reward of the greedy response to the same prompt.

    >>> batch = replace(step("a", [1.0]), details={"greedy_score": tensor([0.25])})
    >>> remax(batch, AdvantageConfig()).advantages.tolist()
    [[0.75]]
    """
    greedy = required_detail(batch, GREEDY_SCORE, "collect the samples with algo.advantage.estimator=remax")
    return _returns(batch, batch.rewards.double() - greedy)


@ADVANTAGE_ESTIMATORS.register(
    "reinforce_baseline", normalise=batch_whitened, options=("norm_by_std", "center", "exclude_equal_groups")
)
def reinforce_baseline(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute REINFORCE++-baseline (arXiv:2501.03262): returns of r − mean_group, before `batch_whitened` scales them.

    >>> batch = step("aa", [1.0, 0.0], [[1, 1], [1, 0]])
    >>> reinforce_baseline(batch, AdvantageConfig()).advantages.tolist()
    [[0.5, 0.5], [-0.5, 0.0]]
    """
    return _returns(batch, centred(batch.rewards.double(), group_stats(batch.rewards, batch.uids)))


@ADVANTAGE_ESTIMATORS.register("reinforce_max", normalise=max_normalised, options=("uniform_scale",), min_group=2)
def reinforce_max(batch: ScoredBatch, cfg: AdvantageConfig) -> Estimate:
    """Compute REINFORCE Max: returns of r_i − (Σ r − r_i)/(n − 1), before `max_normalised` scales them.

    With `uniform_scale`, rows of a group whose rewards are all equal use r/n instead.

    >>> reinforce_max(step("aa", [1.0, 0.0]), AdvantageConfig()).advantages.tolist()
    [[1.0], [-1.0]]
    """
    stats = group_stats(batch.rewards, batch.uids)
    rewards = batch.rewards.double()
    advantages = leave_one_out(rewards, stats)
    if cfg.uniform_scale:
        advantages = torch.where(equal_rewards(batch), rewards / stats.size, advantages)
    return _returns(batch, advantages)


@ADVANTAGE_ESTIMATORS.register("none", reads_rewards=False)
def none(batch: ScoredBatch, cfg: AdvantageConfig) -> Tensor:
    """Return A = 0 for every token, whatever the rewards: what trains is a teacher alone (`algo.distill`).

    >>> none(step("a", [1.0]), AdvantageConfig()).tolist()
    [0.0]
    """
    return torch.zeros_like(batch.rewards, dtype=torch.float64)
