"""Define the section `algo:`, which composes an RL algorithm from advantages, policy loss, KL penalty and more."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.algo.cpo import CpoConfig
from megarl.config.algo.luffy import DemonstrationConfig, OffPolicyConfig
from megarl.config.algo.reinforce import AdvantageConfig, CorrectionConfig
from megarl.config.algo.reward import FilterConfig, RewardConfig
from megarl.config.setting import ANY_NUMBER, AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, Range, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """Choose the per-token policy loss and its clipping range; the losses `reinforce` and `sapo` do not clip."""

    name: str = "ppo_clip"  # Name of the policy loss; see docs/algorithms.md.
    # Ratios are clipped below 1 - clip_low; 1: not at all. gmpo: log-ratios are clipped below -clip_low.
    clip_low: float = setting(0.2, SHARE)
    # Ratios are clipped above 1 + clip_high. gmpo: log-ratios are clipped above clip_high.
    clip_high: float = setting(0.2, POSITIVE)
    # ppo_clip: for negative advantages, the loss is at most this × |advantage|; null: no bound.
    dual_clip: float | None = setting(3.0, Range(expected="> 1, or null for no bound", above=1))
    tau_pos: float = setting(1.0, POSITIVE)  # sapo: how fast the gate closes for positive advantages.
    tau_neg: float = setting(1.05, POSITIVE)  # sapo: how fast the gate closes for negative advantages.
    # clip_cov, kl_cov: share of a step's loss tokens, at least one token, that is chosen by covariance.
    cov_share: float = setting(2e-4, SHARE)
    # clip_cov: tokens are chosen among those whose covariance of log-prob and advantage is above this.
    cov_low: float = setting(1.0, ANY_NUMBER)
    cov_high: float = setting(5.0, ANY_NUMBER)  # clip_cov: tokens are chosen among those of a covariance below this.
    cov_kl_coef: float = setting(1.0, AT_LEAST_0)  # kl_cov: coefficient of the penalty on chosen tokens.


@dataclass(frozen=True, slots=True, kw_only=True)
class KLConfig:
    """Configure the KL penalty that keeps the policy near the reference model, in the loss or in the reward."""

    # Where the KL penalty is applied; both: one penalty in the reward and another one in the loss.
    where: Literal["none", "loss", "reward", "both"] = "none"
    estimator: str = "k3"  # Name of the KL estimator; see docs/algorithms.md.
    coef: float = setting(0.001, AT_LEAST_0)  # Coefficient of the penalty; with controller=adaptive, its initial value.
    # fixed: coef stays constant; adaptive: coef rises or falls to bring the KL to target_nats.
    controller: Literal["fixed", "adaptive"] = "fixed"
    target_nats: float = setting(6.0, POSITIVE)  # Target KL per token of the adaptive controller.
    horizon: float = setting(10000.0, POSITIVE)  # Number of rows over which the adaptive controller acts.
    # both: estimator of the penalty in the loss; the settings above are then those of the penalty in the reward.
    loss_estimator: str = "k3"
    loss_coef: float = setting(0.001, AT_LEAST_0)  # both: constant coefficient of the penalty in the loss.

    @property
    def in_reward(self) -> bool:
        return self.where in ("reward", "both")

    @property
    def in_loss(self) -> bool:
        return self.where in ("loss", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyConfig:
    """Configure how the coefficient of the entropy bonus, `algo.entropy_coef`, is controlled during training."""

    # fixed: constant coefficient; learned: its logarithm is a trained parameter; proportional: the coefficient is
    # entropy_coef × target_nats / entropy.
    controller: Literal["fixed", "learned", "proportional"] = "fixed"
    target_nats: float = setting(1.0, POSITIVE)  # learned, proportional: target entropy per token.
    lr: float = setting(0.01, POSITIVE)  # learned: learning rate of the coefficient's AdamW.
    max_coef: float | None = setting(None, POSITIVE)  # Upper bound of the coefficient; null: none.


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """Compose an RL algorithm: reward, advantage estimator, shaping, policy loss, correction, KL, aggregation."""

    name: str = "grpo"  # Name of the algorithm in reports.
    # Python files, or modules by dotted names, that register parts of algorithms by names of yours, as in
    # [my_losses.py]; a run records them, and continues only with the same ones.
    plugins: tuple[str, ...] = setting((), needs_trust=True)
    reward: RewardConfig = field(default_factory=RewardConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    # Functions that change advantages after the estimator and CPO, in this order, by the names under which algo.plugins
    # registered them.
    shapers: tuple[str, ...] = ()
    cpo: CpoConfig = field(default_factory=CpoConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = setting(0.0, AT_LEAST_0)  # Coefficient of the entropy bonus; 0: none.
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    aggregation: str = "token-mean"  # How per-token losses are aggregated; see docs/algorithms.md.
    # Length by which seq-mean-token-sum-norm and dr_grpo divide the loss; null: rollout.max_response_tokens.
    aggregation_horizon_tokens: int | None = setting(None, AT_LEAST_1)
