"""Define scopes: masks that say on which tokens [B, T] or rows [B, 1] a part of a CPO formula acts.

CPO shapes advantages by how much a hint in the prompt changes log-probs. A scope is a function,
and each of its parameters is named after what it reads: a field of `Terms`, or a setting of `algo.cpo`.
"""

import math

from megarl.config.torch_later import Tensor

_LIKELY = 0.1


def correct_rows(correct: Tensor) -> Tensor:
    """Select the rows that the verifier accepts.

    >>> correct_rows(tensor([[True]])).tolist()
    [[True]]
    """
    return correct


def wrong(correct: Tensor) -> Tensor:
    """Select the rows that the verifier rejects.

    >>> wrong(tensor([[True]])).tolist()
    [[False]]
    """
    return ~correct


def negative_rows(negative: Tensor) -> Tensor:
    """Select the rows that CPO treats as negative examples, by the rule that `algo.cpo.neg_scope` names.

    >>> negative_rows(tensor([[True]])).tolist()
    [[True]]
    """
    return negative


def easy(difficulty: Tensor) -> Tensor:
    """Select the rows of easy prompts (difficulty 1).

    >>> easy(tensor([[1]])).tolist()
    [[True]]
    """
    return difficulty == 1


def medium(difficulty: Tensor) -> Tensor:
    """Select the rows of prompts of medium difficulty (0).

    >>> medium(tensor([[1]])).tolist()
    [[False]]
    """
    return difficulty == 0


def not_medium(difficulty: Tensor) -> Tensor:
    """Select the rows of easy prompts (difficulty 1) and of hard prompts (−1).

    >>> not_medium(tensor([[1]])).tolist()
    [[True]]
    """
    return difficulty != 0


def hard(difficulty: Tensor) -> Tensor:
    """Select the rows of hard prompts (difficulty −1).

    >>> hard(tensor([[-1]])).tolist()
    [[True]]
    """
    return difficulty == -1


def not_hard(difficulty: Tensor) -> Tensor:
    """Select the rows of prompts that are not hard (difficulty 0 or 1).

    >>> not_hard(tensor([[-1]])).tolist()
    [[False]]
    """
    return difficulty != -1


def mi_up(mi: Tensor) -> Tensor:
    """Select the tokens whose mutual information with the hint is ≥ 0.

    >>> mi_up(tensor([[1.0, -1.0]])).tolist()
    [[True, False]]
    """
    return mi >= 0


def mi_down(mi: Tensor) -> Tensor:
    """Select the tokens whose mutual information with the hint is < 0.

    >>> mi_down(tensor([[1.0, -1.0]])).tolist()
    [[False, True]]
    """
    return mi < 0


def confirmed(delta: Tensor, hint_logprobs: Tensor, ratio_clamp: float) -> Tensor:
    """Select tokens that the hint makes likelier, exp(delta) ≥ `ratio_clamp`, and whose probability with it is above
    0.1.

    >>> confirmed(tensor([[2.0, 0.0]]), tensor([[-1.0, -3.0]]), ratio_clamp=2.0).tolist()
    [[True, False]]
    """
    return (delta >= math.log(ratio_clamp)) & (hint_logprobs.exp() > _LIKELY)


def rejected(delta: Tensor, old_logprobs: Tensor, ratio_clamp: float) -> Tensor:
    """Select tokens that the hint makes less likely, exp(delta) ≤ 1/`ratio_clamp`, and whose probability without it is
    above 0.1.

    >>> rejected(tensor([[-2.0, 0.0]]), tensor([[-1.0, -1.0]]), ratio_clamp=2.0).tolist()
    [[True, False]]
    """
    return (delta <= -math.log(ratio_clamp)) & (old_logprobs.exp() > _LIKELY)
