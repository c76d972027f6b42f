"""Checks of `algo.cpo` that need its registries."""

from collections.abc import Iterator
from dataclasses import fields

from megarl.algos.cpo.difficulty import DIFFICULTIES
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.methods import formula, formula_set
from megarl.algos.unused import refuse_unused
from megarl.config.algo import CpoConfig
from megarl.errors import ConfigError


def check_cpo(cfg: CpoConfig) -> None:
    """ConfigError for an unknown name, a conflict, or a setting that the formula does not read."""
    chosen = formula_set(cfg)
    DIFFICULTIES.get(cfg.difficulty)
    estimator = MI_ESTIMATORS.get(cfg.mi_estimator)
    refuse_unused(
        "algo.cpo",
        cfg,
        _unread(cfg),
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


def _unread(cfg: CpoConfig) -> Iterator[str]:
    """Settings that the formula does not read. Not among them: the hint, which run files set for all algorithms, and
    the weights of terms, which may be 0 for any formula."""
    chosen = formula(cfg)
    if cfg.method == "none":
        yield from (field.name for field in fields(cfg) if field.name not in ("method", "hint"))
    if cfg.method != "verifier_sign":
        yield from ("mix", "mix_decay_steps", "weight_clip")
    if not chosen.uses_hint:
        yield from ("ratio_clamp", "shuffled_baseline", "exclude_answer")
    if not chosen.uses_mi:
        yield "mi_estimator"
    if not chosen.uses_entropy:
        yield "entropy_source"
    if not chosen.uses_neg_scope:
        yield "neg_scope"
    if not chosen.uses_difficulty:
        yield "difficulty"
