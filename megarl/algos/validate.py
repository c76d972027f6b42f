"""Check that the choices of the section `algo` exist and read what is set; its classes hold the rules without names."""

import warnings
from collections.abc import Mapping

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.corrections import check_correction
from megarl.algos.cpo import check_cpo
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
from megarl.config.algo import AlgoConfig
from megarl.config.setting import check_values
from megarl.errors import ConfigError
from megarl.registry import FunctionRegistry, readers_of, refuse_unused, unknown_name

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
    part = POLICY_LOSSES.get(cfg.policy_loss.name)
    AGGREGATIONS.get(cfg.aggregation)
    KL_CONTROLLERS.get(cfg.kl.controller)
    KL_ESTIMATORS.get(cfg.kl.estimator)
    if cfg.kl.loss_estimator not in KL_ESTIMATORS:
        raise unknown_name("KL estimator", cfg.kl.loss_estimator, KL_ESTIMATORS, key="algo.kl.loss_estimator")
    PREFIX_STRATEGIES.get(cfg.demonstrations.strategy)
    demonstration_reshape(cfg.off_policy)
    ratio_reshape(cfg.off_policy)
    check_values(cfg, ("algo",), "algo")
    key, loss = "loss_estimator" if cfg.kl.where == "both" else "estimator", cfg.policy_loss
    in_loss = getattr(cfg.kl, key)
    if cfg.kl.in_loss and (refusal := KL_ESTIMATORS.get(in_loss).refused_in_loss):
        raise ConfigError(
            f"algo.kl.{key}: got {in_loss!r} with algo.kl.where={cfg.kl.where}: {refusal}; "
            f"use k2, k3 or k3_straight_through, or algo.kl.where=reward"
        )
    if part.row_ratio and cfg.aggregation != "seq-mean-token-mean":
        raise ConfigError(
            f"algo.aggregation: got {cfg.aggregation!r} with algo.policy_loss.name={loss.name}, whose ratio "
            f"is one per row; set algo.aggregation=seq-mean-token-mean"
        )
    if loss.clip_high > part.tuned_clip:
        warnings.warn(
            f"algo.policy_loss.clip_high={loss.clip_high} hardly ever clips under {loss.name}, whose ratio is a mean "
            f"over the row; the paper uses 3e-4 and 4e-4",
            stacklevel=2,
        )
    shapers_of(cfg)
    check_rewards(cfg, max_response_tokens=max_response_tokens)
    check_cpo(cfg.cpo)
    check_correction(cfg)
    _check_demonstrations(cfg)
    check_entropy(cfg)
    for name, readers in readers_of(POLICY_LOSSES).items():
        if loss.name not in readers:
            situation, remedy = f"algo.policy_loss.name={loss.name}", f"set algo.policy_loss.name={readers[0]}"
            refuse_unused("algo.policy_loss", loss, (name,), situation, remedy, harmless=(None,))
    if not AGGREGATIONS.get(cfg.aggregation).uses_horizon:
        situation, remedy = f"algo.aggregation={cfg.aggregation}", "set algo.aggregation=dr_grpo"
        refuse_unused("algo", cfg, ("aggregation_horizon_tokens",), situation, remedy)


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
