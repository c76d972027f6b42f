"""Checks of `algo.cpo` that need its registries."""

from megarl.algos.cpo.difficulty import DIFFICULTIES
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.methods import formula, formula_set
from megarl.config.algo import CpoConfig
from megarl.errors import ConfigError


def check_cpo(cfg: CpoConfig) -> None:
    """ConfigError for an unknown name or a conflict."""
    chosen = formula(cfg)
    DIFFICULTIES.get(cfg.difficulty)
    estimator = MI_ESTIMATORS.get(cfg.mi_estimator)
    if cfg.neg_scope is not None and not chosen.uses_neg_scope:
        raise ConfigError(
            f"algo.cpo.neg_scope: got {cfg.neg_scope!r} with algo.cpo.method={cfg.method!r}, whose "
            f"{formula_set(cfg)} formula does not ask who is negative; set it to null"
        )
    if cfg.shuffled_baseline and estimator.uses_hint_kl:
        raise ConfigError(
            f"algo.cpo.shuffled_baseline: got true with algo.cpo.mi_estimator={cfg.mi_estimator}, which is not a "
            f"difference of log-probs; set it to false, or another estimator"
        )
    if formula_set(cfg) == "fix" and cfg.difficulty == "variance":
        raise ConfigError(
            "algo.cpo.difficulty: got 'variance' with algo.cpo.formula_set=fix: it calls a group without a correct "
            "sample easy; set algo.cpo.difficulty=variance_signed"
        )
    if "{hint}" not in cfg.hint.template:
        raise ConfigError(
            f"algo.cpo.hint.template: got {cfg.hint.template!r}, expected text with {{hint}} in it; "
            f"the hint stands in its place"
        )
