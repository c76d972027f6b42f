"""Estimate the KL to the reference per token, subtract it from rewards as a penalty, and control its coefficient.

With Δ = logprobs − ref_logprobs, k1 = Δ, k2 = Δ²/2 and k3 = e^−Δ + Δ − 1 estimate KL(policy ‖ reference) on
tokens that the policy sampled (J. Schulman, "Approximating KL divergence", 2020). As *losses* they differ: in
expectation, k2 has the gradient of the reverse KL, k3 has a different gradient, and the gradient of k1 is zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from megarl.algos.masked import row_means
from megarl.config.algo import KLConfig
from megarl.config.torch_later import Tensor
from megarl.errors import NonFiniteError
from megarl.registry import FunctionRegistry, Registry
from megarl.types import AlgoState

KLFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLEstimator:
    """A KL estimator; `refused_in_loss` says why it is refused as a loss, and is None if it is not."""

    compute: KLFunction = field(kw_only=False)
    refused_in_loss: str | None = None


KL_ESTIMATORS: FunctionRegistry[KLFunction, KLEstimator] = FunctionRegistry(
    "KL estimator",
    key="algo.kl.estimator",
    entry=KLEstimator,
    parameters=("logprobs", "ref_logprobs"),
)

# Bounds exp() in k3, and k3 itself: one token far from the reference must not decide the whole batch.
MAX_EXPONENT = 20.0
MAX_K3 = 10.0


@KL_ESTIMATORS.register(
    "k1", "kl", refused_in_loss="its gradient has zero expectation on-policy, so it does not regularise"
)
def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return Δ = logprobs − ref_logprobs, an unbiased estimate of the KL that may be negative.

    >>> k1(tensor([-1.0]), tensor([-2.0])).tolist()
    [1.0]
    """
    return logprobs - ref_logprobs


@KL_ESTIMATORS.register("abs", refused_in_loss="its gradient, sign(Δ) at any distance, is not that of a KL")
def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return |Δ|, Δ = logprobs − ref_logprobs. Its mean is an upper bound of the KL, not an estimate.

    >>> absolute(tensor([-2.0]), tensor([-1.0])).tolist()
    [1.0]
    """
    return (logprobs - ref_logprobs).abs()


@KL_ESTIMATORS.register("k2", "mse")
def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return Δ²/2, Δ = logprobs − ref_logprobs: a biased, low-variance KL estimate.

    Its expected gradient is that of the reverse KL.

    >>> k2(tensor([-1.0]), tensor([-2.0])).tolist()
    [0.5]
    """
    return 0.5 * (logprobs - ref_logprobs).square()


@KL_ESTIMATORS.register("k3", "low_var_kl")
def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return e^−Δ + Δ − 1, clamped to ±10: an unbiased KL estimate but for the clamp, where its gradient is 0.

    >>> k3(tensor([-1.0]), tensor([-2.0])).round(decimals=3).tolist()
    [0.368]
    """
    exponent = (ref_logprobs - logprobs).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return (exponent.exp() - exponent - 1).clamp(-MAX_K3, MAX_K3)


@KL_ESTIMATORS.register("k3_straight_through")
def k3_straight_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the value of `k3` with the gradient of `k2`, which in expectation is that of the reverse KL.

    >>> k3_straight_through(tensor([-1.0]), tensor([-2.0])).round(decimals=3).tolist()
    [0.368]
    """
    surrogate = k2(logprobs, ref_logprobs)
    return k3(logprobs, ref_logprobs).detach() + (surrogate - surrogate.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class PenalisedRewards:
    """Token rewards after the KL penalty; `current_kl` (nats) is the mean over rows of each row's token mean."""

    token_level_rewards: Tensor  # [B, T]
    current_kl: float


def apply_kl_penalty(token_level_scores: Tensor, kl: Tensor, loss_mask: Tensor, *, coef: float) -> PenalisedRewards:
    """Return token rewards [B, T]: scores − coef·kl on loss tokens, and unchanged scores elsewhere.

    >>> scores, kl, mask = tensor([[0.0, 1.0]]), tensor([[1.0, 2.0]]), tensor([[True, True]])
    >>> apply_kl_penalty(scores, kl, mask, coef=0.5).token_level_rewards.tolist()
    [[-0.5, 0.0]]
    """
    has_tokens = loss_mask.any(dim=-1)
    current_kl = row_means(kl, loss_mask).sum() / has_tokens.sum().clamp(min=1)
    penalty = (coef * kl).masked_fill(~loss_mask, 0.0)
    return PenalisedRewards(token_level_rewards=token_level_scores - penalty, current_kl=float(current_kl.item()))


@dataclass(frozen=True, slots=True, kw_only=True)
class KLObservation:
    """Input of a KL controller after a step: the step's mean KL in nats, and the number of rows behind that mean."""

    kl_nats: float
    num_rows: int


KLController: TypeAlias = Callable[[AlgoState, KLObservation, KLConfig], AlgoState]

KL_CONTROLLERS: Registry[KLController] = Registry("KL controller", key="algo.kl.controller")

# Largest relative error that one update of the adaptive controller acts on.
MAX_KL_ERROR = 0.2


@KL_CONTROLLERS.register("fixed")
def fixed(state: AlgoState, seen: KLObservation, cfg: KLConfig) -> AlgoState:
    """Keep the KL coefficient unchanged.

    >>> fixed(AlgoState(kl_coef=1.0), KLObservation(kl_nats=9.0, num_rows=100), KLConfig()).kl_coef
    1.0
    """
    return state


@KL_CONTROLLERS.register("adaptive")
def adaptive(state: AlgoState, seen: KLObservation, cfg: KLConfig) -> AlgoState:
    """Steer β to the target KL (arXiv:1909.08593): β ← β·(1 + e·num_rows/horizon), e = clip(KL/target − 1, ±0.2).

    >>> cfg = KLConfig(controller="adaptive", target_nats=0.1, horizon=1000)
    >>> adaptive(AlgoState(kl_coef=1.0), KLObservation(kl_nats=0.2, num_rows=100), cfg).kl_coef
    1.02
    """
    if not math.isfinite(seen.kl_nats):
        raise NonFiniteError(f"KL to the reference: got {seen.kl_nats}, expected a finite number of nats")
    error = min(max(seen.kl_nats / cfg.target_nats - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return replace(state, kl_coef=state.kl_coef * (1 + error * seen.num_rows / cfg.horizon))
