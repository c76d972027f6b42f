"""Define the formulas by which CPO's methods change advantages, compute the tensors that they read, and apply them."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeAlias

from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.inputs import CpoInputs
from megarl.config.algo import CpoConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import NonFiniteError
from megarl.registry import Registry

# The rules for which rows count as negative, [B] bool.
NEG_SCOPES: Registry[Callable[[CpoInputs], Tensor]] = Registry("negative scope", key="algo.cpo.neg_scope")


@NEG_SCOPES.register("not_all_correct")
def _in_groups_not_all_correct(x: CpoInputs) -> Tensor:
    return x.difficulty != 1


@NEG_SCOPES.register("all_wrong_group")
def _in_groups_all_wrong(x: CpoInputs) -> Tensor:
    return (x.difficulty == -1) & ~x.correct


@NEG_SCOPES.register("negative_sample")
def _wrong(x: CpoInputs) -> Tensor:
    return ~x.correct


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The tensors [B, T] that CPO's formulas read, 0 on tokens that must not change (`advantages`: 0 outside the loss
    mask).

    active: bool, the tokens that may change. delta: d = hint_logprobs − old_logprobs, or with `shuffled_baseline`
    hint_logprobs − shuffled_hint_logprobs. old_logprobs, hint_logprobs: log-probs without and with the hint. mi: mutual
    information of token and hint, in nats. entropy: nats. Per row, [B, 1]: correct (bool, by the verifier), negative
    (bool, by the rule `algo.cpo.neg_scope`) and difficulty (−1, 0 or 1). coefficients: the method's numbers, by name.
    """

    inputs: CpoInputs
    cfg: CpoConfig
    active: Tensor
    advantages: Tensor
    delta: Tensor
    old_logprobs: Tensor
    hint_logprobs: Tensor
    mi: Tensor
    entropy: Tensor
    correct: Tensor
    negative: Tensor
    difficulty: Tensor
    vocab_size: int
    step: int
    coefficients: Mapping[str, float]


def make_terms(
    x: CpoInputs,
    cfg: CpoConfig,
    *,
    neg_scope: str,
    uses_hint: bool,
    uses_entropy: bool,
    coefficients: Mapping[str, float] = MappingProxyType({}),
) -> Terms:
    """Compute the tensors that one CPO formula reads. Tensors that the formula does not read are 0 and need no inputs.

    Raises NonFiniteError if an input is NaN or infinite on a token whose advantage may change.

    >>> x = terms([[1.0, -1.0]]).inputs
    >>> cfg = CpoConfig()
    >>> make_terms(x, cfg, neg_scope="negative_sample", uses_hint=True, uses_entropy=False).delta.tolist()
    [[1.0, -1.0]]
    """
    active = x.active
    advantages = _clean("advantages", x.advantages, x.loss_mask)
    zeros = torch.zeros_like(advantages)
    old, hint, delta, mi = zeros, zeros, zeros, zeros
    if uses_hint:
        old = _clean("old_logprobs", x.need("old_logprobs"), active)
        hint = _clean("hint_logprobs", x.need("hint_logprobs"), active)
        baseline = old
        if cfg.shuffled_baseline:
            baseline = _clean("shuffled_hint_logprobs", x.need("shuffled_hint_logprobs"), active)
        delta = hint - baseline
        estimator = MI_ESTIMATORS.get(cfg.mi_estimator)
        hint_kl = _clean("hint_kl", x.need("hint_kl"), active) if estimator.uses_hint_kl else None
        low, high = estimator.bounds(cfg.ratio_clamp)
        mi = torch.where(active, estimator.of(delta.clamp(low, high), hint, hint_kl), 0.0)
    return Terms(
        inputs=x,
        cfg=cfg,
        active=active,
        advantages=advantages,
        delta=delta,
        old_logprobs=old,
        hint_logprobs=hint,
        mi=mi,
        entropy=_clean("entropy", x.need("entropy"), active).detach() if uses_entropy else zeros,
        correct=x.correct[:, None],
        negative=NEG_SCOPES.get(neg_scope)(x)[:, None],
        difficulty=x.difficulty[:, None],
        vocab_size=x.vocab_size,
        step=x.step,
        coefficients=coefficients,
    )


def _clean(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` with zeros outside `mask`; raise NonFiniteError if a value inside `mask` is NaN or infinite."""
    kept = torch.where(mask, values, 0.0)
    bad_rows = (~kept.isfinite().all(dim=-1)).nonzero().flatten().tolist()
    if bad_rows:
        raise NonFiniteError(
            f"cpo: {name} of row {bad_rows[0]} is not finite on a loss token, expected finite numbers; "
            f"check the forward passes"
        )
    return kept


# A factor, or a scope (bool), [B, T] or [B, 1]. Its parameters name what it reads, out of `READABLE` and the
# coefficients of its method.
Reader: TypeAlias = Callable[..., Tensor]

# The fields of `Terms` and the settings of `algo.cpo` that a formula may read.
HINT_TERMS = frozenset({"delta", "old_logprobs", "hint_logprobs", "mi"})
TERMS = HINT_TERMS | {"advantages", "active", "entropy", "correct", "negative", "difficulty", "vocab_size", "step"}
WEIGHTS = ("pos_alpha", "neg_alpha", "mi_alpha", "kl_alpha")
SETTINGS = (*WEIGHTS, "ratio_clamp", "weight_clip", "mix", "mix_decay_steps")
READABLE = TERMS.union(SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A summand of a formula: sign · weight · Π factors, added to the advantages of the tokens that all scopes select.

    weight: one of `WEIGHTS`, or a coefficient of the method. max_share: the summand is bounded by max_share · |A|
    (None: no bound).
    """

    scopes: tuple[Reader, ...] = ()
    weight: str
    factors: tuple[Reader, ...]
    sign: float = 1.0
    max_share: float | None = None


@functools.cache
def _parameters(reader: Reader) -> frozenset[str]:
    return frozenset(signature(reader).parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A factor of a formula: it multiplies the advantages of the tokens that all scopes select by `value`."""

    scopes: tuple[Reader, ...] = ()
    value: float | Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A formula computes the new advantage A' = A·Π gains + Σ terms. An empty formula leaves advantages unchanged.

    accuracy_clamp: whether A' is kept ≥ 0 in rows that the verifier accepts, and ≤ 0 in rows that it rejects.
    """

    gains: tuple[Gain, ...] = ()
    terms: tuple[Term, ...] = ()
    accuracy_clamp: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """Return the names of everything that the formula reads: its weights, and the parameters of its scopes and
        factors.
        """
        readers = [scope for gain in self.gains for scope in gain.scopes]
        readers += [scope for term in self.terms for scope in term.scopes]
        readers += [factor for term in self.terms for factor in term.factors]
        readers += [gain.value for gain in self.gains if callable(gain.value)]
        return frozenset(term.weight for term in self.terms).union(*map(_parameters, readers))

    @property
    def uses_hint(self) -> bool:
        return not HINT_TERMS.isdisjoint(self.reads)

    @property
    def uses_difficulty(self) -> bool:
        # Which rows are negative may follow from the difficulty.
        return not self.reads.isdisjoint({"difficulty", "negative"})


def apply_formula(formula: Formula, x: Terms) -> Tensor:
    """Compute A' [B, T] by a formula; the advantages of tokens outside `x.active` do not change.

    >>> apply_formula(Formula(gains=(Gain(value=0.5),)), terms([[0.0]], advantages=[[2.0]])).tolist()
    [[1.0]]
    """

    def read(name: str) -> Any:
        if name in x.coefficients:
            return x.coefficients[name]
        return getattr(x if name in TERMS else x.cfg, name)

    def value(reader: Reader) -> Tensor:
        return reader(**{name: read(name) for name in signature(reader).parameters})

    def where(scopes: tuple[Reader, ...]) -> Tensor:
        return reduce(torch.logical_and, map(value, scopes), x.active)

    result = x.advantages
    for gain in formula.gains:
        factor = value(gain.value) if callable(gain.value) else gain.value
        result = torch.where(where(gain.scopes), result * factor, result)
    for term in formula.terms:
        amount = reduce(torch.mul, map(value, term.factors)) * (term.sign * read(term.weight))
        if term.max_share is not None:
            amount = torch.minimum(amount, term.max_share * x.advantages.abs())
        result = torch.where(where(term.scopes), result + amount, result)
    if formula.accuracy_clamp:
        result = torch.where(x.correct, result.clamp(min=0), result.clamp(max=0))
    return torch.where(x.active, result, x.advantages)
