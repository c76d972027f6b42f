"""Check that the choices of the section `algo` exist and fit together; `megarl.config` checks types and ranges."""

import warnings
from dataclasses import fields

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.corrections import check_correction
from megarl.algos.cpo import check_cpo
from megarl.algos.entropy import check_entropy
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS
from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.algos.shaping import shapers_of
from megarl.algos.validate_luffy import check_luffy
from megarl.algos.validate_rewards import check_rewards
from megarl.config.algo import AlgoConfig
from megarl.errors import ConfigError
from megarl.registry import readers_of, refuse_unused, unknown_name


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
    if not loss.cov_low < loss.cov_high:
        raise ConfigError(
            f"algo.policy_loss.cov_low and algo.policy_loss.cov_high: got {loss.cov_low} and {loss.cov_high}, expected "
            f"cov_low < cov_high, as clip_cov chooses among tokens between them; the paper has 1 and 5"
        )
    shapers_of(cfg)
    check_rewards(cfg, max_response_tokens=max_response_tokens)
    check_cpo(cfg.cpo)
    check_correction(cfg)
    check_luffy(cfg)
    check_entropy(cfg)
    _check_all_is_read(cfg)
    if cfg.kl.where != "none" and cfg.kl.controller == "adaptive" and cfg.kl.coef == 0:
        raise ConfigError(
            "algo.kl.coef: got 0 with algo.kl.controller=adaptive, which scales the coefficient and so never "
            "leaves 0; set algo.kl.coef > 0, or algo.kl.where=none"
        )


def _check_all_is_read(cfg: AlgoConfig) -> None:
    """Raise ConfigError for settings of the whole algorithm that nothing reads; its parts check their own settings."""
    loss, kl = cfg.policy_loss, cfg.kl
    for name, readers in readers_of(POLICY_LOSSES).items():
        if loss.name not in readers:
            situation, remedy = f"algo.policy_loss.name={loss.name}", f"set algo.policy_loss.name={readers[0]}"
            refuse_unused("algo.policy_loss", loss, (name,), situation, remedy, harmless=(None,))
    if kl.where == "none":
        settings = (field.name for field in fields(kl) if field.name != "where")
        refuse_unused(
            "algo.kl", kl, settings, "algo.kl.where=none", "set algo.kl.where=loss or reward", harmless=(0.0,)
        )
    elif kl.where != "both":
        settings_of_both = ("loss_estimator", "loss_coef")
        refuse_unused("algo.kl", kl, settings_of_both, f"algo.kl.where={kl.where}", "set algo.kl.where=both")
    if kl.controller == "fixed":
        settings_of_adaptive = ("target_nats", "horizon")
        refuse_unused(
            "algo.kl", kl, settings_of_adaptive, "algo.kl.controller=fixed", "set algo.kl.controller=adaptive"
        )
    if not AGGREGATIONS.get(cfg.aggregation).uses_horizon:
        refuse_unused(
            "algo",
            cfg,
            ("aggregation_horizon_tokens",),
            f"algo.aggregation={cfg.aggregation}",
            "set algo.aggregation=dr_grpo",
        )
