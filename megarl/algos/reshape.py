"""Reshape probabilities and ratios: replace x in a policy loss by a function f(x) (LUFFY, arXiv:2504.14945)."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algos.policy_losses import MAX_LOG_RATIO
from megarl.config.algo import OffPolicyConfig
from megarl.errors import ConfigError
from megarl.registry import Registry


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
        return logprobs if self.half is None else logsigmoid(logprobs - math.log(self.half))

    def _value(self, log_s: Tensor, log_x: Tensor) -> Tensor:
        return self.linear * (self.exponent * log_s).exp() + self.log * log_x


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeArguments:
    """The parameters of a named reshape: two settings, and `half`, the number at the end of names that have one."""

    weight: float
    exponent: float
    half: float | None


ReshapeMaker: TypeAlias = Callable[[ReshapeArguments], Reshape]

DEMONSTRATION_RESHAPES: Registry[ReshapeMaker] = Registry("reshape", key="algo.off_policy.reshape")
RATIO_RESHAPES: Registry[ReshapeMaker] = Registry("reshape", key="algo.off_policy.on_policy_reshape")

for _registry in (DEMONSTRATION_RESHAPES, RATIO_RESHAPES):
    _registry.register("no_reshape")(lambda a: Reshape())
    _registry.register("p_logp")(lambda a: Reshape(log=a.weight))
    _registry.register("square_root")(lambda a: Reshape(exponent=0.5))
    _registry.register("pow")(lambda a: Reshape(exponent=a.exponent))
    _registry.register("p_div_p")(lambda a: Reshape(half=a.half))
DEMONSTRATION_RESHAPES.register("logp")(lambda a: Reshape(linear=0.0, log=a.weight))
# As in LUFFY's code, the ratio's logp has no weight.
RATIO_RESHAPES.register("logp")(lambda a: Reshape(linear=0.0, log=1.0))

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


def _named(registry: Registry[ReshapeMaker], name: str, field: str, *, weight: float, exponent: float) -> Reshape:
    numbered = _NUMBERED.fullmatch(name)
    half = float(numbered[1]) if numbered else None
    if (numbered or name == _P_DIV_P) and not half:
        raise ConfigError(f"algo.off_policy.{field}: got {name!r}, expected p_div_p_C with C > 0, as in p_div_p_0.1")
    maker = registry.get(_P_DIV_P if numbered else name)
    return maker(ReshapeArguments(weight=weight, exponent=exponent, half=half))
