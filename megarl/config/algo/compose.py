"""The composition itself."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.algo.cpo import CpoConfig
from megarl.config.algo.luffy import DemonstrationConfig, OffPolicyConfig
from megarl.config.algo.reinforce import AdvantageConfig, CorrectionConfig
from megarl.config.algo.reward import FilterConfig, RewardConfig
from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, POSITIVE, PROBABILITY, Range, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """The policy loss per token and its clip range; `reinforce` has none."""

    name: str = "ppo_clip"  # See docs/algorithms.md.
    clip_low: float = setting(0.2, PROBABILITY)  # Ratios are clipped below 1 - clip_low.
    clip_high: float = setting(0.2, POSITIVE)  # Ratios are clipped above 1 + clip_high.
    # ppo_clip: bounds the loss of negative advantages at this × |advantage|; null: none.
    dual_clip: float | None = setting(3.0, Range(expected="> 1, or null for no bound", above=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class KLConfig:
    """KL to the reference: in the loss, in the reward, or nowhere."""

    where: Literal["none", "loss", "reward"] = "none"  # Where the KL penalty acts.
    estimator: str = "k3"  # See docs/algorithms.md.
    coef: float = setting(0.001, AT_LEAST_0)  # Its coefficient, with the adaptive controller the first one.
    controller: Literal["fixed", "adaptive"] = "fixed"  # adaptive steers towards target_nats.
    target_nats: float = setting(6.0, POSITIVE)  # KL per token to steer to.
    horizon: float = setting(10000.0, POSITIVE)  # Rows over which the controller acts.


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyConfig:
    """The coefficient of the entropy bonus, `algo.entropy_coef`, and what steers it."""

    # learned: its logarithm is a parameter; proportional: entropy_coef × target / entropy.
    controller: Literal["fixed", "learned", "proportional"] = "fixed"
    target_nats: float = setting(1.0, POSITIVE)  # Entropy per token to steer to.
    lr: float = setting(0.01, POSITIVE)  # learned: step size of its AdamW.
    max_coef: float | None = setting(None, POSITIVE)  # Upper bound of the coefficient; null: none.


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """An algorithm is a composition: reward × estimator × shaping × policy loss × correction × KL × aggregation."""

    name: str = "grpo"  # For reports.
    reward: RewardConfig = field(default_factory=RewardConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    cpo: CpoConfig = field(default_factory=CpoConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = setting(0.0, AT_LEAST_0)  # Coefficient of an entropy bonus; 0: none.
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    aggregation: str = "token-mean"  # From tokens to the loss; see docs/algorithms.md.
    # Length that seq-mean-token-sum-norm and dr_grpo divide by; null means rollout.max_response_tokens.
    aggregation_horizon_tokens: int | None = setting(None, AT_LEAST_1)
