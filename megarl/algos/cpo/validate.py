"""Check that the settings under `algo.cpo` name existing choices and agree with each other."""

from dataclasses import fields

from megarl.algos.cpo.difficulty import DIFFICULTIES
from megarl.algos.cpo.formulas import SETTINGS, WEIGHTS
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.methods import coefficients, formula, formula_set
from megarl.config.algo import CpoConfig
from megarl.errors import ConfigError
from megarl.registry import refuse_unused


def check_cpo(cfg: CpoConfig) -> None:
    """Raise ConfigError for unknown names, settings that contradict each other, and settings that the formula ignores.

    >>> check_cpo(CpoConfig(method="mi", shuffled_baseline=True, mi_estimator="full_kl"))
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.cpo.shuffled_baseline: got true with ...
    """
    chosen, read = formula_set(cfg), formula(cfg)
    if cfg.difficulty != "data":
        DIFFICULTIES.get(cfg.difficulty)
    estimator = MI_ESTIMATORS.get(cfg.mi_estimator)
    coefficients(cfg)
    # The hint is never refused, because run files set it for all algorithms.
    of_none = (field.name for field in fields(cfg) if field.name not in ("method", "hint"))
    unread = (
        (of_none, cfg.method == "none"),
        ((name for name in SETTINGS if name not in (*WEIGHTS, "ratio_clamp", *read.reads)), True),
        # λ bounds estimators and `cpo/ratio_clamped_frac`, whatever the formula is.
        (("ratio_clamp", "shuffled_baseline", "exclude_answer"), not read.uses_hint),
        (("mi_estimator",), "mi" not in read.reads),
        (("entropy_source",), "entropy" not in read.reads),
        (("neg_scope",), "negative" not in read.reads),
        (("difficulty", "difficulty_field"), not read.uses_difficulty),
        (("difficulty_field",), cfg.difficulty != "data"),
    )
    situation = f"the {chosen} formula of algo.cpo.method={cfg.method}"
    refuse_unused(
        "algo.cpo",
        cfg,
        (name for names, is_unread in unread if is_unread for name in names),
        situation,
        "choose another method or formula set",
    )
    unread_weights = (name for name in WEIGHTS if name not in read.reads)
    refuse_unused("algo.cpo", cfg, unread_weights, situation, "choose another method", harmless=(0.0,))
    if cfg.difficulty == "data" and cfg.difficulty_field is None:
        raise ConfigError(
            "algo.cpo.difficulty_field: got null with algo.cpo.difficulty=data; set it to the field of extra_info that "
            "holds the difficulty"
        )
    if cfg.shuffled_baseline and estimator.uses_hint_kl:
        raise ConfigError(
            f"algo.cpo.shuffled_baseline: got true with algo.cpo.mi_estimator={cfg.mi_estimator}, which is not a "
            f"difference of log-probs; set it to false, or another estimator"
        )
    if chosen == "fix" and cfg.difficulty == "variance":
        raise ConfigError(
            "algo.cpo.difficulty: got 'variance' with algo.cpo.formula_set=fix: it calls a group without a correct "
            "sample easy; set algo.cpo.difficulty=variance_signed"
        )
