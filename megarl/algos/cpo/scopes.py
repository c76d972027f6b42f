"""Where a term of a CPO formula acts: bool per token [B, T], or per row [B, 1]."""

import math
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from megarl.algos.cpo.terms import Terms

Scope: TypeAlias = Callable[[Terms], Tensor]

_LIKELY = 0.1


def correct(x: Terms) -> Tensor:
    """Rows that the verifier accepts.

    >>> correct(terms([[0.0, 0.0]], correct=True)).tolist()
    [[True]]
    """
    return x.inputs.correct[:, None]


def wrong(x: Terms) -> Tensor:
    """Rows that the verifier rejects.

    >>> wrong(terms([[0.0, 0.0]], correct=True)).tolist()
    [[False]]
    """
    return ~correct(x)


def negative(x: Terms) -> Tensor:
    """Rows that count as negative by `algo.cpo.neg_scope`.

    >>> negative(terms([[0.0, 0.0]], correct=False)).tolist()
    [[True]]
    """
    return x.negative[:, None]


def easy(x: Terms) -> Tensor:
    """Rows of difficulty 1.

    >>> easy(terms([[0.0, 0.0]], difficulty=1)).tolist()
    [[True]]
    """
    return x.inputs.difficulty[:, None] == 1


def medium(x: Terms) -> Tensor:
    """Rows of difficulty 0.

    >>> medium(terms([[0.0, 0.0]], difficulty=1)).tolist()
    [[False]]
    """
    return x.inputs.difficulty[:, None] == 0


def not_medium(x: Terms) -> Tensor:
    """Rows of difficulty 1 or −1.

    >>> not_medium(terms([[0.0, 0.0]], difficulty=1)).tolist()
    [[True]]
    """
    return ~medium(x)


def hard(x: Terms) -> Tensor:
    """Rows of difficulty −1.

    >>> hard(terms([[0.0, 0.0]], difficulty=-1)).tolist()
    [[True]]
    """
    return x.inputs.difficulty[:, None] == -1


def not_hard(x: Terms) -> Tensor:
    """Rows of difficulty 0 or 1.

    >>> not_hard(terms([[0.0, 0.0]], difficulty=-1)).tolist()
    [[False]]
    """
    return ~hard(x)


def mi_up(x: Terms) -> Tensor:
    """Tokens with MI ≥ 0.

    >>> mi_up(terms([[1.0, -1.0]])).tolist()
    [[True, False]]
    """
    return x.mi >= 0


def mi_down(x: Terms) -> Tensor:
    """Tokens with MI < 0.

    >>> mi_down(terms([[1.0, -1.0]])).tolist()
    [[False, True]]
    """
    return x.mi < 0


def confirmed(x: Terms) -> Tensor:
    """Tokens with exp(d) ≥ λ that are likely with the hint.

    >>> confirmed(terms([[2.0, 0.0]], ratio_clamp=2.0)).tolist()
    [[True, False]]
    """
    return (x.delta >= math.log(x.cfg.ratio_clamp)) & (x.hint_logprobs.exp() > _LIKELY)


def rejected(x: Terms) -> Tensor:
    """Tokens with exp(d) ≤ 1/λ that were likely without the hint.

    >>> rejected(terms([[-2.0, 0.0]], old=-1.0, ratio_clamp=2.0)).tolist()
    [[True, False]]
    """
    return (x.delta <= -math.log(x.cfg.ratio_clamp)) & (x.old_logprobs.exp() > _LIKELY)


# What reads the mutual information, and the difficulty: who is negative follows from it too.
MI_SCOPES: frozenset[Scope] = frozenset({mi_up, mi_down})
DIFFICULTY_SCOPES: frozenset[Scope] = frozenset({easy, medium, not_medium, hard, not_hard, negative})
