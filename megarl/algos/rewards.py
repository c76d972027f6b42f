"""Turn rewards into advantages: shape rewards, choose their source (scorer or critic), and hide those of some rows."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.algos.advantages import Estimate, Flip, compute_advantages
from megarl.algos.advantages.critic import last_values
from megarl.algos.masked import summary
from megarl.algos.mixed_groups import demonstration_mask
from megarl.algos.token_rewards import KL_PENALTY, TURN_REWARDS, sequence_rewards
from megarl.config.algo import AdvantageConfig, RewardConfig, RewardMaskConfig
from megarl.config.torch_later import Tensor, torch
from megarl.types import ScoredBatch
from megarl.types.seeds import uniform

# Makes this random choice independent of others with the same seed.
_MASK_SALT = "reward mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedRewards:
    """The rewards [B] after shaping, and metrics of the shaping to log."""

    rewards: Tensor
    metrics: Mapping[str, float]


def shape_rewards(batch: ScoredBatch, cfg: RewardConfig, *, max_response_tokens: int) -> ShapedRewards:
    """Shape the scorer's rewards in this order: add the overlong penalty, change truncated rows, clamp to `clip`.

    Metrics: critic/rule_score/* (before shaping, of samples without a demonstration, if there are any);
    reward/{overlong_penalty_mean,truncated_frac,clipped_frac}.

    >>> cfg = RewardConfig(clip=(0.0, 1.0))
    >>> shape_rewards(step("a", [3.0]), cfg, max_response_tokens=8).rewards.tolist()
    [1.0]
    """
    rewards = batch.rewards
    own = ~demonstration_mask(batch).any(dim=-1)
    metrics = summary("critic/rule_score", rewards[own] if own.any() else rewards)
    num_rows = max(len(rewards), 1)
    if cfg.overlong_buffer_tokens is not None:
        penalty = overlong_penalty(
            batch.loss_mask.sum(dim=-1),
            max_tokens=max_response_tokens,
            buffer_tokens=cfg.overlong_buffer_tokens,
            factor=cfg.overlong_factor,
        )
        rewards = rewards + penalty.to(rewards.dtype)
        metrics["reward/overlong_penalty_mean"] = float(penalty.sum().item()) / num_rows
    if cfg.truncated is not None and batch.truncated is not None:
        changed = rewards * cfg.truncated if cfg.truncated >= 0 else torch.full_like(rewards, cfg.truncated)
        rewards = torch.where(batch.truncated, changed, rewards)
        metrics["reward/truncated_frac"] = int(batch.truncated.sum()) / num_rows
    if cfg.clip is not None:
        clipped = rewards.clamp(*cfg.clip)
        metrics["reward/clipped_frac"] = int((clipped != rewards).sum()) / num_rows
        rewards = clipped
    return ShapedRewards(rewards=rewards, metrics=metrics)


def overlong_penalty(num_tokens: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float) -> Tensor:
    """Compute DAPO's soft overlong punishment (arXiv:2503.14476), in float64: 0 up to max_tokens − buffer_tokens, then
    falling linearly to −factor at max_tokens.

    >>> overlong_penalty(tensor([7, 8]), max_tokens=8, buffer_tokens=2, factor=1.0).tolist()
    [-0.5, -1.0]
    """
    excess = (num_tokens.double() - (max_tokens - buffer_tokens)).clamp(0, buffer_tokens)
    return -excess / buffer_tokens * factor


def reward_advantages(
    batch: ScoredBatch, reward: RewardConfig, advantage: AdvantageConfig, *, keep: Tensor | None = None
) -> Estimate:
    """Turn shaped rewards and the KL penalty into advantages: choose the source, hide rows' rewards, estimate.

    With `source=critic`, a row's reward is the critic's value of its last loss token, there is no KL penalty, and the
    estimator is `critic_value`. Rows outside `keep` [B] (None: `keep_rows` chooses) get reward and KL penalty 0. Their
    advantages then change sign, unless `mask.flip` is false or `source=critic`. Returns never change sign.

    Metrics: reward_source/{rule_based,critic}, critic/score/* (rewards by source), critic/rewards/* (after KL penalty
    and hiding), reward_mask/{num_masked,mask_ratio_actual,flip_adv}, and the estimator's metrics.

    >>> cfg = AdvantageConfig(estimator="dr_grpo")
    >>> reward_advantages(step("aa", [1.0, 0.0]), RewardConfig(), cfg).advantages.tolist()
    [[0.5], [-0.5]]
    """
    from_critic = reward.source == "critic"
    if from_critic:
        batch = critic_rewards(batch)
        advantage = replace(advantage, estimator="critic_value")
    metrics = {"reward_source/critic" if from_critic else "reward_source/rule_based": 1.0}
    metrics |= summary("critic/score", batch.rewards)
    if keep is None and reward.mask.ratio > 0:
        keep = keep_rows(batch.uids, reward.mask, seed=batch.seed)
    flip = None
    if keep is not None:
        batch = hide_rewards(batch, keep)
        num_masked = int((~keep).sum())
        metrics["reward_mask/num_masked"] = float(num_masked)
        metrics["reward_mask/mask_ratio_actual"] = num_masked / max(len(keep), 1)
        if not from_critic and reward.mask.flip is not False:
            flip = Flip(rows=~keep, stage=reward.mask.flip_stage)
            metrics["reward_mask/flip_adv"] = 1.0
    metrics |= summary("critic/rewards", sequence_rewards(batch))
    estimate = compute_advantages(batch, advantage, flip)
    return replace(estimate, metrics={**metrics, **estimate.metrics})


def critic_rewards(batch: ScoredBatch) -> ScoredBatch:
    """Return the batch with rewards replaced by the critic's value of each row's last loss token, without KL penalty.

    >>> critic_rewards(step("a", [1.0], values=[[0.5, 0.25]])).rewards.tolist()
    [0.25]
    """
    quantities = {name: values for name, values in batch.quantities.items() if name not in (KL_PENALTY, TURN_REWARDS)}
    return replace(batch, rewards=last_values(batch).to(batch.rewards.dtype), quantities=quantities)


def hide_rewards(batch: ScoredBatch, keep: Tensor) -> ScoredBatch:
    """Return the batch with rewards and KL penalty set to 0 in the rows where `keep` [B] is false.

    >>> hide_rewards(step("aa", [1.0, 1.0]), tensor([True, False])).rewards.tolist()
    [1.0, 0.0]
    """
    quantities = dict(batch.quantities)
    for name in {KL_PENALTY, TURN_REWARDS} & quantities.keys():
        quantities[name] = torch.where(keep[:, None], quantities[name], 0.0)
    return replace(batch, rewards=torch.where(keep, batch.rewards, 0.0), quantities=quantities)


def keep_rows(uids: Sequence[str], cfg: RewardMaskConfig, *, seed: int) -> Tensor:
    """Return [B] bool, true for the rows that keep their reward; `cfg.ratio` is the share of rows that lose it.

    Each row has a number in [0, 1), a hash of the seed, its uid and its index within its group. `bernoulli` hides the
    rewards of rows whose number is below `ratio`; `fixed` those of the ⌊rows × ratio⌋ rows with the smallest numbers.
    So a resumed run makes the same choices without saved state, and the order of groups does not matter.

    >>> keep_rows("aaaa", RewardMaskConfig(kind="fixed", ratio=0.5), seed=7).sum().item()
    2
    """
    places: Counter[str] = Counter()
    numbers = []
    for uid in uids:
        numbers.append(uniform(_MASK_SALT, seed, places[uid], uid, byteorder="big"))
        places[uid] += 1
    draws = torch.tensor(numbers, dtype=torch.float64)
    if cfg.kind == "bernoulli":
        return draws >= cfg.ratio
    keep = torch.ones(len(uids), dtype=torch.bool)
    # round() makes a ratio of 0.29 hide 29 of 100 rows, although its binary value gives a product just below 29.
    keep[draws.argsort()[: math.floor(round(len(uids) * cfg.ratio, 9))]] = False
    return keep
