"""Check that the names in the section `algo` exist and that what is set is read; its classes hold the other rules."""

import warnings
from collections.abc import Mapping
from dataclasses import fields

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, estimator_of
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.corrections import CORRECTIONS
from megarl.algos.cpo import check_cpo, shapes_in_loss
from megarl.algos.entropy import check_entropy
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS
from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.algos.prefixes import PREFIX_STRATEGIES
from megarl.algos.reshape import (
    DEMONSTRATION_RESHAPES,
    RATIO_RESHAPES,
    ReshapeMaker,
    ReshapeRule,
    demonstration_reshape,
    ratio_reshape,
)
from megarl.algos.shaping import shapers_of
from megarl.algos.validate_rewards import check_rewards
from megarl.config.algo import AlgoConfig, CorrectionConfig
from megarl.config.setting import check_values
from megarl.errors import ConfigError
from megarl.registry import FunctionRegistry, readers_of, refuse_unused, unknown_name

_OF_ROWS = ("seq-mean-token-mean", "seq-mean-token-sum")
# The settings of algo.off_policy that choose a reshape; a setting that the reshape reads begins with the same name.
_RESHAPES: Mapping[str, FunctionRegistry[ReshapeMaker, ReshapeRule]] = {
    "reshape": DEMONSTRATION_RESHAPES,
    "on_policy_reshape": RATIO_RESHAPES,
}


def check_algo_config(cfg: AlgoConfig, *, max_response_tokens: int) -> None:
    """Raise ConfigError for unknown names, settings that contradict each other, and settings that nothing would read.

    >>> check_algo_config(AlgoConfig(aggregation="mean"), max_response_tokens=8)
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.aggregation: unknown aggregation 'mean'; expected one of: ...
    """
    ADVANTAGE_ESTIMATORS.get(cfg.advantage.estimator)
    POLICY_LOSSES.get(cfg.policy_loss.name)
    AGGREGATIONS.get(cfg.aggregation)
    KL_CONTROLLERS.get(cfg.kl.controller)
    KL_ESTIMATORS.get(cfg.kl.estimator)
    if cfg.kl.loss_estimator not in KL_ESTIMATORS:
        raise unknown_name("KL estimator", cfg.kl.loss_estimator, KL_ESTIMATORS, key="algo.kl.loss_estimator")
    PREFIX_STRATEGIES.get(cfg.demonstrations.strategy)
    demonstration_reshape(cfg.off_policy)
    ratio_reshape(cfg.off_policy)
    check_values(cfg, ("algo",), "algo")
    key = "loss_estimator" if cfg.kl.where == "both" else "estimator"
    in_loss = getattr(cfg.kl, key)
    if cfg.kl.in_loss and (refusal := KL_ESTIMATORS.get(in_loss).refused_in_loss):
        raise ConfigError(
            f"algo.kl.{key}: got {in_loss!r} with algo.kl.where={cfg.kl.where}: {refusal}; "
            f"use k2, k3 or k3_straight_through, or algo.kl.where=reward"
        )
    _check_policy_loss(cfg)
    if "old_squares" in estimator_of(cfg).reads and cfg.cpo.method != "none":
        raise ConfigError(
            f"algo.advantage.estimator: got {cfg.advantage.estimator!r} with algo.cpo.method={cfg.cpo.method}, whose "
            "pass with hints does not compute what the estimator reads; choose another estimator"
        )
    if cfg.high_entropy_share is not None and shapes_in_loss(cfg.cpo):
        raise ConfigError(
            f"algo.high_entropy_share: got {cfg.high_entropy_share:g} with algo.cpo.entropy_source=current, which "
            "shapes advantages in the loss, after those of other tokens were set to 0; set algo.cpo.entropy_source=old"
        )
    if cfg.step_scale_power is None:
        remedy = "set algo.step_scale_power=0.5"
        refuse_unused("algo", cfg, ("step_scale_ess",), "algo.step_scale_power=null", remedy)
    shapers_of(cfg)
    check_rewards(cfg, max_response_tokens=max_response_tokens)
    check_cpo(cfg.cpo)
    check_correction(cfg)
    _check_head(cfg)
    _check_demonstrations(cfg)
    check_entropy(cfg)
    if not AGGREGATIONS.get(cfg.aggregation).uses_horizon:
        situation, remedy = f"algo.aggregation={cfg.aggregation}", "set algo.aggregation=dr_grpo"
        refuse_unused("algo", cfg, ("aggregation_horizon_tokens",), situation, remedy)


def _check_policy_loss(cfg: AlgoConfig) -> None:
    """Raise ConfigError for an aggregation that the loss does not allow, and for settings that it does not read."""
    loss, part = cfg.policy_loss, POLICY_LOSSES.get(cfg.policy_loss.name)
    if part.row_ratio and cfg.aggregation not in _OF_ROWS:
        raise ConfigError(
            f"algo.aggregation: got {cfg.aggregation!r} with algo.policy_loss.name={loss.name}, whose ratio "
            f"is one per row; set algo.aggregation=seq-mean-token-mean, or seq-mean-token-sum as LUSPO does"
        )
    if loss.clip_high > part.tuned_clip:
        warnings.warn(
            f"algo.policy_loss.clip_high={loss.clip_high} hardly ever clips under {loss.name}; lower it, as "
            f"{part.clip_note}",
            stacklevel=2,
        )
    if loss.name == "drpo" and loss.drpo_delta > 1:
        warnings.warn(
            f"algo.policy_loss.drpo_delta={loss.drpo_delta} bounds no change of a probability, as none is above 1; it "
            f"scales gradients by 1 ± {1 / loss.drpo_delta:.2g} at most. A value below 1 ends them",
            stacklevel=2,
        )
    for name, readers in readers_of(POLICY_LOSSES).items():
        if loss.name not in readers:
            situation, remedy = f"algo.policy_loss.name={loss.name}", f"set algo.policy_loss.name={readers[0]}"
            refuse_unused("algo.policy_loss", loss, (name,), situation, remedy, harmless=(None,))


def check_correction(cfg: AlgoConfig) -> None:
    """Raise ConfigError for an unknown correction, options that are not read, or a loss without a place for it.

    >>> check_correction(AlgoConfig(correction=CorrectionConfig(low=0.9)))
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.correction.low: got 0.9, which is not read with algo.correction.name=none, ...
    """
    correction = cfg.correction
    rule = CORRECTIONS.get(correction.name)
    takes = ", ".join(sorted(rule.options)) or "no options"
    if correction.name == "baseline_unbiased":
        takes += ": its baseline stays unbiased only if nothing but earlier tokens decides and ratios are not bounded"
    refuse_unused(
        "algo.correction",
        correction,
        (each.name for each in fields(correction) if each.name != "name" and each.name not in rule.options),
        f"algo.correction.name={correction.name}, which takes {takes}",
        "choose another correction",
    )
    loss = POLICY_LOSSES.get(cfg.policy_loss.name)
    if loss.row_ratio and correction.name not in ("none", "rollout_ratio"):
        raise ConfigError(
            f"algo.correction.name: got {correction.name!r} with algo.policy_loss.name={cfg.policy_loss.name}, whose "
            "ratio is one per row and takes no weights per token; set algo.correction.name=rollout_ratio, which takes "
            "that ratio to the engine's log-probs, or none"
        )
    if loss.takes_weights and not rule.per_token:
        raise ConfigError(
            f"algo.correction.name: got {correction.name!r} with algo.policy_loss.name={cfg.policy_loss.name}, which "
            "multiplies the weights of a row's tokens, so that one of the whole row would count as often as it has "
            "tokens; set algo.correction.name=tis_upper, or another whose weights are those of tokens"
        )
    if "clip_bounds" in loss.reads and not rule.rollout_ratio:
        raise ConfigError(
            f"algo.correction.name: got {correction.name!r} with algo.policy_loss.name={cfg.policy_loss.name}, whose "
            "bounds are chosen by ratios to the engine's log-probs, which the loss has to have, too; set "
            "algo.correction.name=rollout_ratio"
        )
    if "old_logprobs" not in loss.reads and rule.rollout_ratio:
        raise ConfigError(
            f"algo.correction.name: got {correction.name!r} with algo.policy_loss.name={cfg.policy_loss.name}, which "
            "has no ratio that could be taken to the engine's log-probs; set algo.correction.name=tis_upper or another "
            "with weights, or algo.policy_loss.name=ppo_clip"
        )


def _check_head(cfg: AlgoConfig) -> None:
    """Raise ConfigError for what cannot stand beside a loss that compares the policy with the engine's distribution."""
    key, loss = f"algo.policy_loss.name={cfg.policy_loss.name}", POLICY_LOSSES.get(cfg.policy_loss.name)
    if cfg.echo_coef and (cfg.distill.is_dense or loss.measure is not None):
        other = f"algo.distill.mode={cfg.distill.mode}" if loss.measure is None else key
        raise ConfigError(
            f"algo.echo_coef: got {cfg.echo_coef:g} with {other}, which compares distributions at all tokens that the "
            "log-prob head computes, but nobody has one for what environments said; set algo.echo_coef=0"
        )
    if loss.measure is None:
        return
    is_own = cfg.policy_loss.compared_with == "trainer"
    if is_own and CORRECTIONS.get(cfg.correction.name).rollout_ratio:
        raise ConfigError(
            f"algo.correction.name: got {cfg.correction.name!r} with {key} and compared_with=trainer, whose ratio is "
            "to the policy at the start of the step; set algo.correction.name=none, or one with weights, as tis_upper"
        )
    if cfg.policy_loss.kept_versions and cfg.correction != CorrectionConfig():
        raise ConfigError(
            f"algo.correction.name: got {cfg.correction.name!r} with {key} and kept_versions="
            f"{cfg.policy_loss.kept_versions}, whose ratio is to the weights that sampled, so that staleness would be "
            "weighed twice; set algo.correction.name=none"
        )
    if "old_logprobs" not in loss.reads and cfg.correction != CorrectionConfig() and not is_own:
        raise ConfigError(
            f"algo.correction.name: got {cfg.correction.name!r} with {key}, which weighs tokens by the ratio of the "
            "current policy to the engine itself, so that both would weigh them twice; set algo.correction.name=none"
        )
    if "old_logprobs" in loss.reads and not (is_own or CORRECTIONS.get(cfg.correction.name).rollout_ratio):
        raise ConfigError(
            f"algo.correction.name: got {cfg.correction.name!r} with {key}, whose recorded head is the engine's, not "
            "that of old weights, so that the ratio has to be to the engine too; set algo.correction.name=rollout_ratio"
        )
    if cfg.distill.is_dense:
        raise ConfigError(
            f"algo.distill.mode: got {cfg.distill.mode} with {key}, but the log-prob head compares the policy with one "
            "distribution, here the sampler's; set algo.distill.mode=sampled, or another loss"
        )
    if cfg.demonstrations.strategy != "none":
        raise ConfigError(
            f"algo.demonstrations.strategy: got {cfg.demonstrations.strategy} with {key}, but no engine has a "
            "distribution at tokens of demonstrations; set it to none, or another loss"
        )


def _check_demonstrations(cfg: AlgoConfig) -> None:
    """Raise ConfigError for settings that the chosen strategy and reshapes do not read."""
    demonstrations, strategy = cfg.demonstrations, cfg.demonstrations.strategy
    for name, readers in readers_of(PREFIX_STRATEGIES).items():
        if strategy not in readers:
            remedy = f"set strategy={' or '.join(readers)}"
            refuse_unused("algo.demonstrations", demonstrations, (name,), f"strategy={strategy}", remedy)
    for key, registry in _RESHAPES.items():
        reshape = getattr(cfg.off_policy, key)
        for option, readers in readers_of(registry).items():
            if reshape not in readers:
                remedy = f"set {key}={' or '.join(readers)}"
                refuse_unused("algo.off_policy", cfg.off_policy, (f"{key}_{option}",), f"{key}={reshape}", remedy)
