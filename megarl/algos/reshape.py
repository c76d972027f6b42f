"""Reshape probabilities and ratios: replace x in a policy loss by a function f(x) (LUFFY, arXiv:2504.14945)."""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from megarl.algos.policy_losses import MAX_LOG_RATIO
from megarl.config.algo import OffPolicyConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import ConfigError
from megarl.registry import FunctionRegistry, require_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """A function f(x) = linear·s(x)^exponent + log·ln x, with s(x) = x, or s(x) = x / (x + half) if `half` is set.

    x / (x + half) has the derivative half·x / (x + half)² with respect to ln x, which is largest at x = half: tokens
    of about that probability learn most.
    """

    linear: float = 1.0
    exponent: float = 1.0
    log: float = 0.0
    half: float | None = None

    def of_probability(self, logprobs: Tensor) -> Tensor:
        """Compute f(P) with P = exp(logprobs)."""
        return self._value(self._log_s(logprobs), logprobs)

    def of_ratio(self, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """Compute f(R) with R = exp(logprobs − old_logprobs), or with `half` R = s(P) / s(P_old); ln R is clamped to
        ±20.
        """
        log_ratio = self._log_s(logprobs) - self._log_s(old_logprobs)
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return self._value(log_ratio, log_ratio)

    def _log_s(self, logprobs: Tensor) -> Tensor:
        return logprobs if self.half is None else torch.nn.functional.logsigmoid(logprobs - math.log(self.half))

    def _value(self, log_s: Tensor, log_x: Tensor) -> Tensor:
        return self.linear * (self.exponent * log_s).exp() + self.log * log_x


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeArguments:
    """The parameters of a named reshape: two settings, and `half`, the number at the end of names that have one."""

    weight: float
    exponent: float
    half: float | None


ReshapeMaker: TypeAlias = Callable[[ReshapeArguments], Reshape]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeRule:
    """The function of a reshape's name; `options` are the settings among the arguments that `make` reads."""

    make: ReshapeMaker = field(kw_only=False)
    options: Collection[str] = ()

    def __post_init__(self) -> None:
        require_fields(self.options, ReshapeArguments)


DEMONSTRATION_RESHAPES: FunctionRegistry[ReshapeMaker, ReshapeRule] = FunctionRegistry(
    "reshape", key="algo.off_policy.reshape", entry=ReshapeRule, parameters=("arguments",)
)
RATIO_RESHAPES: FunctionRegistry[ReshapeMaker, ReshapeRule] = FunctionRegistry(
    "reshape", key="algo.off_policy.on_policy_reshape", entry=ReshapeRule, parameters=("arguments",)
)


@DEMONSTRATION_RESHAPES.register("no_reshape")
@RATIO_RESHAPES.register("no_reshape")
def _identity(arguments: ReshapeArguments) -> Reshape:
    return Reshape()


@DEMONSTRATION_RESHAPES.register("logp", options=("weight",))
def _weighted_log(arguments: ReshapeArguments) -> Reshape:
    return Reshape(linear=0.0, log=arguments.weight)


# As in LUFFY's code, the ratio's logp has no weight.
@RATIO_RESHAPES.register("logp")
def _log(arguments: ReshapeArguments) -> Reshape:
    return Reshape(linear=0.0, log=1.0)


@DEMONSTRATION_RESHAPES.register("p_logp", options=("weight",))
@RATIO_RESHAPES.register("p_logp", options=("weight",))
def _plus_log(arguments: ReshapeArguments) -> Reshape:
    return Reshape(log=arguments.weight)


@DEMONSTRATION_RESHAPES.register("square_root")
@RATIO_RESHAPES.register("square_root")
def _square_root(arguments: ReshapeArguments) -> Reshape:
    return Reshape(exponent=0.5)


@DEMONSTRATION_RESHAPES.register("pow", options=("exponent",))
@RATIO_RESHAPES.register("pow", options=("exponent",))
def _power(arguments: ReshapeArguments) -> Reshape:
    return Reshape(exponent=arguments.exponent)


@DEMONSTRATION_RESHAPES.register("p_div_p")
@RATIO_RESHAPES.register("p_div_p")
def _saturating(arguments: ReshapeArguments) -> Reshape:
    return Reshape(half=arguments.half)


_P_DIV_P = "p_div_p"
_NUMBERED = re.compile(rf"{_P_DIV_P}_(\d*\.?\d+)")


def demonstration_reshape(cfg: OffPolicyConfig) -> Reshape:
    """Return the configured reshape for demonstration tokens; raise ConfigError for an unknown name.

    >>> square = demonstration_reshape(OffPolicyConfig(reshape="pow", reshape_exponent=2.0))
    >>> square.of_probability(tensor([0.5]).log()).tolist()
    [0.25]
    """
    return _named(
        DEMONSTRATION_RESHAPES, cfg.reshape, "reshape", weight=cfg.reshape_weight, exponent=cfg.reshape_exponent
    )


def ratio_reshape(cfg: OffPolicyConfig) -> Reshape:
    """Return the configured reshape for the ratios of policy tokens; raise ConfigError for an unknown name.

    >>> root = ratio_reshape(OffPolicyConfig(on_policy_reshape="square_root"))
    >>> root.of_ratio(tensor([4.0]).log(), tensor([1.0]).log()).tolist()
    [2.0]
    """
    return _named(
        RATIO_RESHAPES,
        cfg.on_policy_reshape,
        "on_policy_reshape",
        weight=cfg.on_policy_reshape_weight,
        exponent=cfg.on_policy_reshape_exponent,
    )


def _named(
    registry: FunctionRegistry[ReshapeMaker, ReshapeRule], name: str, field: str, *, weight: float, exponent: float
) -> Reshape:
    numbered = _NUMBERED.fullmatch(name)
    half = float(numbered[1]) if numbered else None
    if (numbered or name == _P_DIV_P) and not half:
        raise ConfigError(f"algo.off_policy.{field}: got {name!r}, expected p_div_p_C with C > 0, as in p_div_p_0.1")
    rule = registry.get(_P_DIV_P if numbered else name)
    return rule.make(ReshapeArguments(weight=weight, exponent=exponent, half=half))
