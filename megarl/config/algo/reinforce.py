"""Advantage estimators and the correction for rollouts that another engine sampled."""

from dataclasses import dataclass

from megarl.config.setting import AT_LEAST_0, FRACTION, POSITIVE, SHARE, Range, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Which estimator turns rewards into advantages."""

    estimator: str = "grpo"  # See docs/algorithms.md.
    # grpo, grpo_split: divide by the group's standard deviation; reinforce_baseline: by the batch's.
    norm_by_std: bool = True
    # reinforce_baseline: subtract the token-weighted mean of the batch, which gives groups of equal rewards a signal.
    center: bool = True
    # reinforce_baseline: leave groups of equal rewards out of the batch's statistics, and do not shift them.
    exclude_equal_groups: bool = False
    # reinforce_max: groups of equal rewards r train with r / group size instead of nothing.
    uniform_scale: bool = False
    gamma: float = setting(1.0, SHARE)  # gae: discount; the other estimators take 1.
    lam: float = setting(1.0, FRACTION)  # gae: λ of the actor's advantages.
    lam_critic: float | None = setting(None, FRACTION)  # gae: λ of the critic's returns; null: that of the actor.
    whiten: bool = True  # gae, critic_value: to mean 0 and variance 1 over the batch's loss tokens.


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """Weights on the policy loss for what the rollout engine's log-probs differ from the trainer's.

    ρ = exp(old_logprobs − rollout_logprobs) per token, cut at `low` and `high` as the correction's formula says.
    """

    name: str = "none"  # See docs/algorithms.md.
    low: float = setting(0.5, AT_LEAST_0)  # Lower threshold, inclusive; at most 1.
    high: float = setting(5.0, POSITIVE)  # Upper threshold, inclusive; at least 1.
    # sequence_mask: rows whose mean of −ln ρ, in nats, exceeds this are masked.
    max_kl_nats: float = setting(0.1, POSITIVE)
    # Bound of the weight of a token that a gate lets pass; null: none.
    token_cap: float | None = setting(None, POSITIVE)
    # Rows with a token of ρ above this, or below its inverse, get weight 0; null: none.
    veto: float | None = setting(None, Range(expected="> 1, or null for none", above=1))
    # The gate rejects only tokens of negative advantage.
    only_negative: bool = False
    # The weights of a step are divided by their mean over the tokens that the engine sampled.
    normalise: bool = False
