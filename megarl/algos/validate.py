"""Checks that an algorithm's choices exist and agree; `megarl.config` checks types and ranges."""

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS, LOSS_REFUSALS
from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.config.schema import AlgoConfig, KLConfig
from megarl.errors import ConfigError


def check_algo_config(cfg: AlgoConfig) -> None:
    """ConfigError for an unknown name or a conflict."""
    ADVANTAGE_ESTIMATORS.get(cfg.advantage.estimator)
    POLICY_LOSSES.get(cfg.policy_loss.name)
    AGGREGATIONS.get(cfg.aggregation)
    KL_CONTROLLERS.get(cfg.kl.controller)
    _check_kl_estimator(cfg.kl)
    if cfg.kl.where != "none" and cfg.kl.controller == "adaptive" and cfg.kl.coef == 0:
        raise ConfigError(
            "algo.kl.coef: got 0 with algo.kl.controller=adaptive, which scales the coefficient and so never "
            "leaves 0; set algo.kl.coef > 0, or algo.kl.where=none"
        )


def _check_kl_estimator(cfg: KLConfig) -> None:
    estimator = KL_ESTIMATORS.get(cfg.estimator)
    if cfg.where == "loss" and estimator in LOSS_REFUSALS:
        raise ConfigError(
            f"algo.kl.estimator: got {cfg.estimator!r} with algo.kl.where=loss: {LOSS_REFUSALS[estimator]}; "
            f"use k2, k3 or k3_straight_through, or algo.kl.where=reward"
        )
