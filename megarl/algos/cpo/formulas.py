"""Define the formulas by which CPO's methods change advantages, and apply them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from inspect import signature
from typing import Any, TypeAlias

from megarl.algos.cpo.terms import Terms
from megarl.config.torch_later import Tensor, torch

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
