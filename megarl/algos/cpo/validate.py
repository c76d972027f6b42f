"""Check the settings of `algo.cpo` against CPO's registries."""

from dataclasses import fields

from megarl.algos.cpo import scopes
from megarl.algos.cpo.difficulty import DIFFICULTIES
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.methods import formula, formula_set
from megarl.config.algo import CpoConfig
from megarl.errors import ConfigError
from megarl.registry import refuse_unused


def check_cpo(cfg: CpoConfig) -> None:
    """Raise ConfigError for an unknown name, a conflict, or a setting that the formula does not read.

    >>> check_cpo(CpoConfig(method="mi", shuffled_baseline=True, mi_estimator="full_kl"))
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.cpo.shuffled_baseline: got true with ...
    """
    chosen, read = formula_set(cfg), formula(cfg)
    DIFFICULTIES.get(cfg.difficulty)
    estimator = MI_ESTIMATORS.get(cfg.mi_estimator)
    # The hint is never refused, because run files set it for all algorithms; weights of terms only with `none`.
    of_none = (field.name for field in fields(cfg) if field.name not in ("method", "hint"))
    unread = (
        (of_none, cfg.method == "none"),
        (("mix", "mix_decay_steps", "weight_clip"), cfg.method != "verifier_sign"),
        (("ratio_clamp", "shuffled_baseline", "exclude_answer"), not read.uses_hint),
        (("mi_estimator",), not read.uses_mi),
        (("entropy_source",), not read.uses_entropy),
        (("neg_scope",), not any(scopes.negative in term.scopes for term in read.terms)),
        (("difficulty",), not read.uses_difficulty),
    )
    refuse_unused(
        "algo.cpo",
        cfg,
        (name for names, is_unread in unread if is_unread for name in names),
        f"the {chosen} formula of algo.cpo.method={cfg.method}",
        "choose another method or formula set",
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
    if "{hint}" not in cfg.hint.template:
        raise ConfigError(
            f"algo.cpo.hint.template: got {cfg.hint.template!r}, expected text with {{hint}} in it; "
            f"the hint stands in its place"
        )
