"""Define the section `algo:`, which composes an RL algorithm from advantages, policy loss, KL penalty and more."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from megarl.config.algo.cpo import CpoConfig
from megarl.config.algo.distill import DistillConfig
from megarl.config.algo.luffy import DemonstrationConfig, OffPolicyConfig
from megarl.config.algo.reinforce import AdvantageConfig, CorrectionConfig
from megarl.config.algo.reward import FilterConfig, RewardConfig
from megarl.config.setting import ANY_NUMBER, AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, Range, setting
from megarl.errors import ConfigError
from megarl.registry import refuse_unused

_GAMMA = Range(expected=">= 1e-4", at_least=1e-4)
# Settings of algo.off_policy that change nothing without demonstrations.
_NEED_DEMONSTRATIONS = ("loss", "demonstration_weight", "prefix_reward", "only_positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """Choose the per-token policy loss and its clipping range; the losses `reinforce` and `sapo` do not clip."""

    name: str = "ppo_clip"  # Name of the policy loss; see docs/algorithms.md.
    # Ratios are clipped below 1 - clip_low; 1: not at all. gmpo: log-ratios are clipped below -clip_low. dppo_tv,
    # dppo_kl: largest divergence of a token that becomes less likely. ctpo: log-ratios, times the root of the place.
    clip_low: float = setting(0.2, SHARE)
    # Ratios are clipped above 1 + clip_high. gmpo: log-ratios are clipped above clip_high. dppo_tv, dppo_kl: largest
    # divergence of a token that becomes more likely. ctpo: log-ratios, times the root of the place in the row.
    clip_high: float = setting(0.2, POSITIVE)
    # ppo_clip, bapo: for negative advantages, the loss is at most this × |advantage|; null: no bound.
    dual_clip: float | None = setting(3.0, Range(expected="> 1, or null for no bound", above=1))
    tau_pos: float = setting(1.0, POSITIVE)  # sapo: how fast the gate closes for positive advantages.
    tau_neg: float = setting(1.05, POSITIVE)  # sapo: how fast the gate closes for negative advantages.
    # clip_cov, kl_cov: share of a step's loss tokens, at least one token, that is chosen by covariance.
    cov_share: float = setting(2e-4, SHARE)
    # clip_cov: tokens are chosen among those whose covariance of log-prob and advantage is above this.
    cov_low: float = setting(1.0, ANY_NUMBER)
    cov_high: float = setting(5.0, ANY_NUMBER)  # clip_cov: tokens are chosen among those of a covariance below this.
    cov_kl_coef: float = setting(1.0, AT_LEAST_0)  # kl_cov: coefficient of the penalty on chosen tokens.
    # drpo: change of a token's probability at which its gradient ends; above 1 it never does, only shrinks.
    drpo_delta: float = setting(12.5, POSITIVE)
    vespo_pos: tuple[float, float] = setting((2.0, 3.0), _GAMMA)  # vespo: k and λ where A ≥ 0.
    vespo_neg: tuple[float, float] = setting((3.0, 2.0), _GAMMA)  # vespo: k and λ where A < 0.
    ctpo_dual: float = setting(0.05, POSITIVE)  # ctpo: for A < 0, bound of log-ratios, times the root of the place.
    flowrl_beta: float = setting(15.0, POSITIVE)  # flowrl: weight of advantages beside log-probs.
    # bapo: range from which the lower bound of the ratio is chosen, in steps of 0.05.
    bapo_low: tuple[float, float] = setting((0.6, 0.8), SHARE)
    bapo_high: tuple[float, float] = setting((1.2, 2.0), POSITIVE)  # bapo: the same for the upper bound.
    bapo_target: float = setting(1.0, POSITIVE)  # bapo: weight of positive advantages, at least, per negative one.
    # score_centering, dppo_top_tv, dppo_top_kl: whose distribution stands for the sampler's. engine: that of its heads
    # (rollout.head_tokens); trainer: the whole of what the policy was when it sampled, by its weights at the start of
    # the step or, for stale samples, by kept_versions.
    compared_with: Literal["engine", "trainer"] = "engine"
    # compared_with=trainer: number of earlier versions of the weights that ranks keep in host memory; as large as the
    # bound on the lag of tokens.
    kept_versions: int = setting(0, AT_LEAST_0, affects=("engines",))
    # score_centering: weight f of the ratio r of policy to engine. none: 1; tis: clip(r, center_low, center_high); mis:
    # r where it is between them, else 0.
    center_weight: Literal["none", "tis", "mis"] = "none"
    center_low: float | None = setting(None, AT_LEAST_0)  # tis, mis: lower bound of r; null: 0 and 0.5.
    center_high: float | None = setting(None, POSITIVE)  # tis, mis: upper bound of r; null: 2 and 5.
    # score_centering: largest mean over a row's tokens of 4·|advantage|·(1 − Q)·max f, by which the tokens outside the
    # engine's heads, of probability 1 − Q, may change the gradient by the logits; null: no limit.
    max_head_error: float | None = setting(1.0, POSITIVE)

    def check(self, key: str) -> None:
        """Raise ConfigError unless there is something between bounds."""
        for name, (low, high) in (("bapo_low", self.bapo_low), ("bapo_high", self.bapo_high)):
            if low > high:
                raise ConfigError(f"{key}.{name}: got {[low, high]}, expected the lower bound first; exchange them")
        low, high = self.center_low or 0.0, self.center_high or 1.0
        if not low <= 1 <= high:
            raise ConfigError(
                f"{key}.center_low and {key}.center_high: got {self.center_low} and {self.center_high}, expected "
                "center_low <= 1 <= center_high, as a ratio of 1 is perfect agreement; take for example 0 and 2"
            )
        if self.center_weight == "none":
            of_ratio = ("center_low", "center_high")
            refuse_unused(key, self, of_ratio, f"{key}.center_weight=none", f"set {key}.center_weight=tis or mis")
        if not self.cov_low < self.cov_high:
            raise ConfigError(
                f"{key}.cov_low and {key}.cov_high: got {self.cov_low} and {self.cov_high}, expected "
                f"cov_low < cov_high, as clip_cov chooses among tokens between them; the paper has 1 and 5"
            )


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
    # Replace the reference by the policy at the end of every so many steps (ProRL); null: it stays as it is.
    reset_every_steps: int | None = setting(None, AT_LEAST_1)

    def check(self, key: str) -> None:
        """Raise ConfigError for settings that no penalty reads, and for a coefficient that cannot move."""
        if self.where == "none":
            others = (each.name for each in fields(self) if each.name != "where")
            refuse_unused(key, self, others, f"{key}.where=none", f"set {key}.where=loss or reward", harmless=(0.0,))
        elif self.where != "both":
            of_both = ("loss_estimator", "loss_coef")
            refuse_unused(key, self, of_both, f"{key}.where={self.where}", f"set {key}.where=both")
        if self.controller == "fixed":
            of_adaptive = ("target_nats", "horizon")
            refuse_unused(key, self, of_adaptive, f"{key}.controller=fixed", f"set {key}.controller=adaptive")
        elif self.where != "none" and self.coef == 0:
            raise ConfigError(
                f"{key}.coef: got 0 with {key}.controller=adaptive, which scales the coefficient and so never "
                f"leaves 0; set {key}.coef > 0, or {key}.where=none"
            )

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
    # Settings that plugins declare for their parts, by a part's name, as in {mine: {width: 0.3}}; they may also stand
    # beside the name, as algo.policy_loss.width.
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
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
    distill: DistillConfig = field(default_factory=DistillConfig)
    entropy_coef: float = setting(0.0, AT_LEAST_0)  # Coefficient of the entropy bonus; 0: none.
    # ECHO: coefficient of the loss that predicts what environments reply, a mean over its tokens; 0: none.
    echo_coef: float = setting(0.0, AT_LEAST_0)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    aggregation: str = "token-mean"  # How per-token losses are aggregated; see docs/algorithms.md.
    # Length by which seq-mean-token-sum-norm and dr_grpo divide the loss; null: rollout.max_response_tokens.
    aggregation_horizon_tokens: int | None = setting(None, AT_LEAST_1)
    # Share of a step's policy tokens that the policy loss trains, those of the highest entropy; null: all.
    high_entropy_share: float | None = setting(None, SHARE)
    # Scale the learning rate of each optimizer step by this power of the share of rows that count after weighting, by
    # ESS / (rows × step_scale_ess), at most 1 (0.5: the square root); null: no scale.
    step_scale_power: float | None = setting(None, SHARE)
    step_scale_ess: float = setting(1.0, SHARE)  # Share of rows that count at which the learning rate is not scaled.

    def check(self, key: str) -> None:
        """Raise ConfigError for parts that do not go together, and settings that nothing reads for want of another."""
        if self.reward.source == "critic" and self.kl.in_reward:
            raise ConfigError(
                f"{key}.kl.where: got {self.kl.where!r} with {key}.reward.source=critic, whose rewards take no KL "
                f"penalty; set {key}.kl.where=loss or none"
            )
        strategy, count = self.demonstrations.strategy, self.demonstrations.num_prefixed
        where = f"{key}.demonstrations"
        for is_off, situation, remedy in (
            (strategy == "none", f"{where}.strategy=none", f"choose another {where}.strategy"),
            (count == 0, f"{where}.num_prefixed=0", f"raise {where}.num_prefixed"),
        ):
            if is_off:
                refuse_unused(f"{key}.off_policy", self.off_policy, _NEED_DEMONSTRATIONS, situation, remedy)
        if self.off_policy.prefix_reward is not None and count != -1:
            raise ConfigError(
                f"{key}.off_policy.prefix_reward: is set with {key}.demonstrations.num_prefixed={count}, expected -1, "
                "as it shares one reward among all samples of a prompt; set num_prefixed=-1, or prefix_reward=null"
            )
        if self.off_policy.loss == "luffy" and self.policy_loss.name != "ppo_clip":
            raise ConfigError(
                f"{key}.policy_loss.name: got {self.policy_loss.name!r} with {key}.off_policy.loss=luffy, which brings "
                "a clipped surrogate of its own; set ppo_clip, whose clip range it uses"
            )
        if self.entropy.controller != "fixed" and self.entropy_coef == 0:
            raise ConfigError(
                f"{key}.entropy_coef: got 0 with {key}.entropy.controller={self.entropy.controller}, which scales the "
                f"coefficient and so never leaves 0; set {key}.entropy_coef > 0, or {key}.entropy.controller=fixed"
            )
        bound = self.entropy.max_coef
        if bound is not None and self.entropy_coef > bound:
            raise ConfigError(
                f"{key}.entropy_coef: got {self.entropy_coef}, expected <= {key}.entropy.max_coef={bound}; lower it or "
                "raise the bound"
            )
