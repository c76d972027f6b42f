"""Define scopes, which select where a term of a CPO formula acts: bool per token [B, T], or per row [B, 1]."""

import math
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from megarl.algos.cpo.terms import Terms

Scope: TypeAlias = Callable[[Terms], Tensor]

_LIKELY = 0.1


def correct(x: Terms) -> Tensor:
    """Select the rows that the verifier accepts.

    >>> correct(terms([[0.0, 0.0]], correct=True)).tolist()
    [[True]]
    """
    return x.inputs.correct[:, None]


def wrong(x: Terms) -> Tensor:
    """Select the rows that the verifier rejects.

    >>> wrong(terms([[0.0, 0.0]], correct=True)).tolist()
    [[False]]
    """
    return ~correct(x)


def negative(x: Terms) -> Tensor:
    """Select the rows that count as negative under `algo.cpo.neg_scope`.

    >>> negative(terms([[0.0, 0.0]], correct=False)).tolist()
    [[True]]
    """
    return x.negative[:, None]


def easy(x: Terms) -> Tensor:
    """Select the rows of difficulty 1.

    >>> easy(terms([[0.0, 0.0]], difficulty=1)).tolist()
    [[True]]
    """
    return x.inputs.difficulty[:, None] == 1


def medium(x: Terms) -> Tensor:
    """Select the rows of difficulty 0.

    >>> medium(terms([[0.0, 0.0]], difficulty=1)).tolist()
    [[False]]
    """
    return x.inputs.difficulty[:, None] == 0


def not_medium(x: Terms) -> Tensor:
    """Select the rows of difficulty 1 or −1.

    >>> not_medium(terms([[0.0, 0.0]], difficulty=1)).tolist()
    [[True]]
    """
    return ~medium(x)


def hard(x: Terms) -> Tensor:
    """Select the rows of difficulty −1.

    >>> hard(terms([[0.0, 0.0]], difficulty=-1)).tolist()
    [[True]]
    """
    return x.inputs.difficulty[:, None] == -1


def not_hard(x: Terms) -> Tensor:
    """Select the rows of difficulty 0 or 1.

    >>> not_hard(terms([[0.0, 0.0]], difficulty=-1)).tolist()
    [[False]]
    """
    return ~hard(x)


def mi_up(x: Terms) -> Tensor:
    """Select the tokens whose mutual information with the hint is ≥ 0.

    >>> mi_up(terms([[1.0, -1.0]])).tolist()
    [[True, False]]
    """
    return x.mi >= 0


def mi_down(x: Terms) -> Tensor:
    """Select the tokens whose mutual information with the hint is < 0.

    >>> mi_down(terms([[1.0, -1.0]])).tolist()
    [[False, True]]
    """
    return x.mi < 0


def confirmed(x: Terms) -> Tensor:
    """Select the tokens with exp(d) ≥ λ = `ratio_clamp` whose probability with the hint is above 0.1.

    >>> confirmed(terms([[2.0, 0.0]], ratio_clamp=2.0)).tolist()
    [[True, False]]
    """
    return (x.delta >= math.log(x.cfg.ratio_clamp)) & (x.hint_logprobs.exp() > _LIKELY)


def rejected(x: Terms) -> Tensor:
    """Select the tokens with exp(d) ≤ 1/λ, with λ = `ratio_clamp`, whose probability without the hint is above 0.1.

    >>> rejected(terms([[-2.0, 0.0]], old=-1.0, ratio_clamp=2.0)).tolist()
    [[True, False]]
    """
    return (x.delta <= -math.log(x.cfg.ratio_clamp)) & (x.old_logprobs.exp() > _LIKELY)


# The scopes that read the mutual information, and those that read the difficulty; `negative` may depend on it too.
MI_SCOPES: frozenset[Scope] = frozenset({mi_up, mi_down})
DIFFICULTY_SCOPES: frozenset[Scope] = frozenset({easy, medium, not_medium, hard, not_hard, negative})
