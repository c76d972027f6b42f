"""Estimate how much information a hint carries about a token, in nats, from d = hint_logprobs − old_logprobs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from megarl.config.torch_later import Tensor
from megarl.registry import FunctionRegistry

# The bound on |d|: one token that is far from the hinted policy must not decide the whole row.
MAX_DELTA = 10.0


MiFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiEstimator:
    """An estimator of the mutual information of token and hint, from d clamped to the range `bounds(ratio_clamp)`.
    of: (d, hint_logprobs, hint_kl or None) → [B, T].
    """

    of: MiFunction = field(kw_only=False)
    bounds: Callable[[float], tuple[float, float]] = lambda ratio_clamp: (-MAX_DELTA, MAX_DELTA)
    uses_hint_kl: bool = False


MI_ESTIMATORS: FunctionRegistry[MiFunction, MiEstimator] = FunctionRegistry(
    "mutual-information estimator",
    key="algo.cpo.mi_estimator",
    entry=MiEstimator,
    parameters=("delta", "hint_logprobs", "hint_kl"),
)


@MI_ESTIMATORS.register("p_weighted", bounds=lambda ratio_clamp: (-math.inf, math.inf))
def p_weighted(delta: Tensor, hint_logprobs: Tensor, hint_kl: Tensor | None) -> Tensor:
    """Return exp(hint_logprobs)·d, CPO's published formula. It down-weights rare tokens, unlike mutual information.

    >>> p_weighted(tensor([2.0]), tensor([0.0]), None).tolist()
    [2.0]
    """
    return hint_logprobs.exp() * delta


@MI_ESTIMATORS.register("pmi")
def pmi(delta: Tensor, hint_logprobs: Tensor, hint_kl: Tensor | None) -> Tensor:
    """Return d, the pointwise mutual information of token and hint.

    >>> pmi(tensor([2.0]), tensor([0.0]), None).tolist()
    [2.0]
    """
    return delta


@MI_ESTIMATORS.register("kl_is", bounds=lambda ratio_clamp: (-MAX_DELTA, min(MAX_DELTA, math.log(ratio_clamp))))
def kl_is(delta: Tensor, hint_logprobs: Tensor, hint_kl: Tensor | None) -> Tensor:
    """Return exp(d)·d, unless d is clamped an unbiased estimate of KL(with hint ‖ without) on the old policy's tokens.

    >>> kl_is(tensor([1.0]), tensor([0.0]), None).round(decimals=3).tolist()
    [2.718]
    """
    return delta.exp() * delta


@MI_ESTIMATORS.register("full_kl", uses_hint_kl=True)
def full_kl(delta: Tensor, hint_logprobs: Tensor, hint_kl: Tensor | None) -> Tensor:
    """Return `hint_kl`, the KL(with hint ‖ without) over the whole vocabulary, computed by a forward pass beforehand.

    >>> full_kl(tensor([2.0]), tensor([0.0]), tensor([0.25])).tolist()
    [0.25]
    """
    if hint_kl is None:
        raise ValueError("full_kl: got no hint_kl, expected [B, T]")
    return hint_kl
