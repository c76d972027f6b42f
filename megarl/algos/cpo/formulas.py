"""Define CPO formulas, and apply them to advantages."""

from dataclasses import dataclass
from functools import reduce
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from megarl.algos.cpo import scopes
from megarl.algos.cpo.factors import ENTROPY_FACTORS, MI_FACTORS, Factor
from megarl.algos.cpo.scopes import Scope
from megarl.algos.cpo.terms import Terms

Weight: TypeAlias = Literal["pos_alpha", "neg_alpha", "mi_alpha", "kl_alpha"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A term adds sign · algo.cpo.{weight} · Π factors to the advantage of tokens on which all scopes hold.

    max_share: the term adds at most `max_share` · |A| (None: no bound)."""

    scopes: tuple[Scope, ...] = ()
    weight: Weight
    factors: tuple[Factor, ...]
    sign: float = 1.0
    max_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A gain multiplies the advantage by a number, or by a factor that reads the hint, where all scopes hold."""

    scopes: tuple[Scope, ...] = ()
    value: float | Factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A formula computes A' = A·Π gains + Σ terms; an empty formula leaves advantages unchanged.

    accuracy_clamp: the sign may not contradict the verifier: max(A', 0) on correct rows, min(A', 0) on the others.
    """

    gains: tuple[Gain, ...] = ()
    terms: tuple[Term, ...] = ()
    accuracy_clamp: bool = False

    @property
    def uses_hint(self) -> bool:
        return bool(self.terms) or any(callable(gain.value) for gain in self.gains)

    @property
    def uses_mi(self) -> bool:
        return any(not (MI_FACTORS.isdisjoint(t.factors) and scopes.MI_SCOPES.isdisjoint(t.scopes)) for t in self.terms)

    @property
    def uses_difficulty(self) -> bool:
        acts_on = [gain.scopes for gain in self.gains] + [term.scopes for term in self.terms]
        return any(not scopes.DIFFICULTY_SCOPES.isdisjoint(where) for where in acts_on)

    @property
    def uses_entropy(self) -> bool:
        return any(not ENTROPY_FACTORS.isdisjoint(term.factors) for term in self.terms)


def apply_formula(formula: Formula, x: Terms) -> Tensor:
    """Compute a formula's A' [B, T]; advantages outside `x.active` stay unchanged.

    >>> apply_formula(Formula(gains=(Gain(value=0.5),)), terms([[0.0]], advantages=[[2.0]])).tolist()
    [[1.0]]
    """
    result = x.advantages
    for gain in formula.gains:
        value = gain.value(x) if callable(gain.value) else gain.value
        result = torch.where(_where(gain.scopes, x), result * value, result)
    for term in formula.terms:
        weight: float = getattr(x.cfg, term.weight)
        amount = reduce(torch.mul, (factor(x) for factor in term.factors)) * (term.sign * weight)
        if term.max_share is not None:
            amount = torch.minimum(amount, term.max_share * x.advantages.abs())
        result = torch.where(_where(term.scopes, x), result + amount, result)
    if formula.accuracy_clamp:
        result = torch.where(scopes.correct(x), result.clamp(min=0), result.clamp(max=0))
    return torch.where(x.active, result, x.advantages)


def _where(conditions: tuple[Scope, ...], x: Terms) -> Tensor:
    return reduce(torch.logical_and, (scope(x) for scope in conditions), x.active)
