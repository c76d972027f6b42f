"""Define CPO's methods as data. Each method has up to three formulas, one for each formula set: doc, ref and fix.

doc: CPO's published description, for methods whose formula it gives. ref: the formula of its public code
(github.com/26hzhang/verl, verl/cpo), with two differences: the verifier decides which rows are correct (there, a reward
of exactly 1), and a row's highest entropy is taken over its loss tokens. fix: means replace sums over a row,
log-ratios are clipped, and negative rows are wrong samples. `algo.cpo.mi_estimator` decides how mutual information is
bounded; the default, `p_weighted`, has no bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from megarl.algos.cpo import factors as f
from megarl.algos.cpo import scopes as s
from megarl.algos.cpo.difficulty import DIFFICULTIES
from megarl.algos.cpo.formulas import READABLE, SETTINGS, WEIGHTS, Formula, Gain, Reader, Term
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.config.algo import CpoConfig
from megarl.errors import ConfigError
from megarl.registry import Registry, refuse_unused

FormulaSet: TypeAlias = Literal["doc", "ref", "fix"]

_NEG_SCOPES: Mapping[FormulaSet, str] = {"doc": "not_all_correct", "ref": "all_wrong_group", "fix": "negative_sample"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A CPO method: one formula per formula set, and the set (`default`) that is used if the configuration names none.

    coefficients: the names and default values of the method's own numbers; `algo.cpo.coefficients` sets them.
    """

    default: FormulaSet
    formulas: Mapping[FormulaSet, Formula]
    coefficients: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = READABLE.union(self.coefficients)
        for name, made in self.formulas.items():
            if unknown := sorted(made.reads - known):
                raise ValueError(
                    f"the {name} formula reads {unknown[0]!r}, expected one of {', '.join(sorted(known))}; rename the "
                    f"parameter, or declare it in the method's coefficients"
                )


CPO_METHODS: Registry[Method] = Registry("CPO method", key="algo.cpo.method")


def formula_set(cfg: CpoConfig) -> FormulaSet:
    """Return the configured formula set, or the default set of the configured method.

    >>> formula_set(CpoConfig(method="mi3"))
    'ref'
    """
    return cfg.formula_set or CPO_METHODS.get(cfg.method).default


def formula(cfg: CpoConfig) -> Formula:
    """Return the configured method's formula in the configured set; raise ConfigError if there is no such formula.

    >>> formula(CpoConfig(method="none"))
    Formula(gains=(), terms=(), accuracy_clamp=False)
    """
    formulas = CPO_METHODS.get(cfg.method).formulas
    chosen = formula_set(cfg)
    if chosen not in formulas:
        raise ConfigError(
            f"algo.cpo.formula_set: got {chosen!r}, which has no formula of {cfg.method!r}; "
            f"expected one of: {', '.join(formulas)}"
        )
    return formulas[chosen]


def neg_scope(cfg: CpoConfig) -> str:
    """Return the name of the rule for which rows count as negative: the configured one, or the formula set's.

    >>> neg_scope(CpoConfig(method="mi3"))
    'all_wrong_group'
    """
    return cfg.neg_scope or _NEG_SCOPES[formula_set(cfg)]


def coefficients(cfg: CpoConfig) -> Mapping[str, float]:
    """Return the method's coefficients, configured or default; raise ConfigError for a name that the method lacks.

    >>> coefficients(CpoConfig(method="mi3"))
    {}
    """
    own = CPO_METHODS.get(cfg.method).coefficients
    for name in cfg.coefficients:
        if name not in own:
            known = f"expected one of: {', '.join(sorted(own))}" if own else "it has none"
            raise ConfigError(f"algo.cpo.coefficients: {cfg.method!r} has no coefficient {name!r}; {known}")
    return {**own, **cfg.coefficients}


def _add(name: str, *, doc: Formula | None = None, ref: Formula, fix: Formula | None = None) -> None:
    """Register a method as `name` and `name`_qwen3; without `fix`, the set fix uses the formula of doc, else of ref."""
    default: FormulaSet = "doc" if doc else "ref"
    formulas: dict[FormulaSet, Formula] = {"doc": doc} if doc else {}
    CPO_METHODS.register(name, f"{name}_qwen3")(
        Method(default=default, formulas={**formulas, "ref": ref, "fix": fix or doc or ref})
    )


# Reward the uncertain tokens of correct rows.
_UNSURE = Term(scopes=(s.correct_rows,), weight="pos_alpha", factors=(f.uncertainty,))

# --- by likelihood ratio and entropy

_CONFIRMED = Term(scopes=(s.confirmed,), weight="pos_alpha", factors=(f.token_entropy,))
_REJECTED = Term(scopes=(s.rejected,), weight="neg_alpha", factors=(f.entropy_gap,), sign=-1.0)
_NAIVE = Formula(terms=(_CONFIRMED, _REJECTED))
_NAIVE_BY_VERDICT = Formula(
    terms=(
        Term(scopes=(s.correct_rows, s.confirmed), weight="pos_alpha", factors=(f.token_entropy,)),
        Term(scopes=(s.wrong, s.rejected), weight="neg_alpha", factors=(f.entropy_gap,), sign=-1.0),
    ),
    accuracy_clamp=True,
)
# Under GRPO the rows of a group with a single verdict have advantage 0, so this acts only with other base estimators.
_BY_DIFFICULTY = Formula(gains=(Gain(scopes=(s.easy, s.correct_rows), value=0.5), Gain(scopes=(s.hard,), value=1.5)))

# For `naive`, the suffix _qwen3 names a different method.
CPO_METHODS.register("naive")(Method(default="ref", formulas={"doc": _BY_DIFFICULTY, "ref": _NAIVE, "fix": _NAIVE}))
CPO_METHODS.register("naive_qwen3")(
    Method(default="doc", formulas={"doc": _BY_DIFFICULTY, "ref": _NAIVE_BY_VERDICT, "fix": _BY_DIFFICULTY})
)
_add("noaccmask", ref=Formula(terms=_NAIVE.terms, accuracy_clamp=True))

# --- by mutual information

_add(
    "mi",
    doc=Formula(terms=(Term(weight="mi_alpha", factors=(f.mutual_information,)),)),
    ref=Formula(
        terms=(
            Term(scopes=(s.mi_up,), weight="pos_alpha", factors=(f.mutual_information, f.uncertainty)),
            Term(scopes=(s.mi_down,), weight="neg_alpha", factors=(f.mutual_information, f.certainty)),
        ),
        accuracy_clamp=True,
    ),
)
_add(
    "mi_accmask",
    ref=Formula(
        terms=(
            Term(
                scopes=(s.correct_rows, s.mi_up),
                weight="pos_alpha",
                factors=(f.mutual_information, f.one_plus_uncertainty),
            ),
            Term(
                scopes=(s.wrong, s.mi_down), weight="neg_alpha", factors=(f.mutual_information, f.two_minus_uncertainty)
            ),
        ),
        accuracy_clamp=True,
    ),
)


def _unified(mi: Reader) -> Formula:
    return Formula(
        terms=(
            Term(scopes=(s.correct_rows,), weight="pos_alpha", factors=(mi, f.certainty)),
            Term(scopes=(s.wrong,), weight="neg_alpha", factors=(mi, f.certainty)),
        ),
        accuracy_clamp=True,
    )


_add("mi_unify", ref=_unified(f.mutual_information))
_add("mi_clamp_unify", ref=_unified(f.capped_mi))
_add(
    "mi_clamp_unify_difficulty",
    doc=Formula(
        terms=(
            Term(scopes=(s.easy,), weight="pos_alpha", factors=(f.clamped_ratio, f.mutual_information)),
            Term(scopes=(s.hard,), weight="neg_alpha", factors=(f.clamped_ratio, f.mutual_information)),
            Term(scopes=(s.medium,), weight="mi_alpha", factors=(f.clamped_ratio, f.mutual_information)),
        )
    ),
    ref=Formula(
        terms=(
            Term(scopes=(s.not_medium,), weight="pos_alpha", factors=(f.capped_mi, f.certainty)),
            Term(scopes=(s.medium,), weight="neg_alpha", factors=(f.capped_mi, f.certainty)),
        )
    ),
)


def _mi3(scope: Reader, *, sign: float = 1.0) -> Formula:
    """Build a formula that adds the uncertainty u on correct rows, and on rows of `scope` sign·MI·u (or, if MI < 0,
    sign·MI·(1 − u)).
    """
    return Formula(
        terms=(
            _UNSURE,
            Term(scopes=(scope, s.mi_up), weight="neg_alpha", factors=(f.mutual_information, f.uncertainty), sign=sign),
            Term(scopes=(scope, s.mi_down), weight="neg_alpha", factors=(f.mutual_information, f.certainty), sign=sign),
        )
    )


_add("mi2", ref=Formula(terms=(_UNSURE, Term(scopes=(s.wrong,), weight="neg_alpha", factors=(f.mutual_information,)))))
_add("mi3", ref=_mi3(s.wrong))
_add("reverse_mi3", ref=_mi3(s.wrong, sign=-1.0))
_add("addition_mi3", ref=Formula(terms=_mi3(s.wrong).terms[:2]))
_add(
    "negonly_mi3",
    doc=Formula(
        terms=(
            Term(
                scopes=(s.negative_rows,),
                weight="neg_alpha",
                factors=(f.clamped_ratio, f.mutual_information, f.vocab_certainty),
            ),
        )
    ),
    ref=_mi3(s.negative_rows),
)
_add(
    "negonly_mi",
    ref=Formula(terms=(_UNSURE, Term(scopes=(s.negative_rows,), weight="neg_alpha", factors=(f.mutual_information,)))),
)

# --- by the log-ratio, of tokens or of rows


def _towards_hint(unsure: Term, kl: Reader) -> Formula:
    """Build a formula of the term `unsure` plus the KL factor `kl` on wrong rows; there, it is at most |A|/2 on easier
    prompts.
    """
    return Formula(
        terms=(
            unsure,
            Term(scopes=(s.wrong, s.hard), weight="neg_alpha", factors=(kl,)),
            Term(scopes=(s.wrong, s.not_hard), weight="neg_alpha", factors=(kl,), max_share=0.5),
        )
    )


# The public code also bounds this bonus from below, by −|A|/2, which has no effect: the bonus is never negative.
_UNSURE_ROW = Term(scopes=(s.correct_rows,), weight="pos_alpha", factors=(f.row_entropy,))

_add(
    "negonly_seq_kl",
    doc=Formula(terms=(Term(scopes=(s.negative_rows,), weight="kl_alpha", factors=(f.row_mi_sum,)),)),
    ref=Formula(
        terms=(
            Term(scopes=(s.correct_rows,), weight="pos_alpha", factors=(f.row_delta,)),
            Term(scopes=(s.negative_rows,), weight="neg_alpha", factors=(f.row_delta,)),
        )
    ),
    fix=Formula(terms=(Term(scopes=(s.negative_rows,), weight="kl_alpha", factors=(f.row_mi_mean,)),)),
)
_add("seq_kl", ref=_towards_hint(_UNSURE_ROW, f.row_delta), fix=_towards_hint(_UNSURE_ROW, f.row_capped_delta))
_add(
    "negonly_tok_kl",
    ref=Formula(terms=(_UNSURE, Term(scopes=(s.negative_rows,), weight="neg_alpha", factors=(f.capped_delta,)))),
)
_add("tok_kl", ref=_towards_hint(_UNSURE, f.capped_delta))

# --- no change, and weights that leave the sign to the verifier

CPO_METHODS.register("none")(Method(default="fix", formulas={"doc": Formula(), "ref": Formula(), "fix": Formula()}))
CPO_METHODS.register("verifier_sign")(
    Method(default="fix", formulas={"fix": Formula(gains=(Gain(value=f.verifier_weights),))})
)


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
