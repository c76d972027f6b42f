"""Control the coefficient of the entropy bonus: loss = policy loss − coef · entropy.

After each step, a controller reads the mean entropy H over the policy's tokens on all ranks, without gradient, and sets
the coefficient for the next step. H covers all ranks because otherwise each rank would have its own coefficient.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from megarl.config.algo import AlgoConfig
from megarl.config.algo.compose import EntropyConfig
from megarl.errors import NonFiniteError
from megarl.registry import FunctionRegistry, refuse_unused, require_fields
from megarl.types import EntropyState

_BETA_1, _BETA_2, _EPS = 0.9, 0.999, 1e-8
# Below this a policy counts as deterministic; it bounds the proportional coefficient.
_MIN_ENTROPY_NATS = 1e-4


EntropyRule: TypeAlias = Callable[[EntropyState, float, AlgoConfig], EntropyState]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyController:
    """A rule for the next step's coefficient; `options` are the fields of `EntropyConfig` that are read with it."""

    next_state: EntropyRule = field(kw_only=False)
    options: Collection[str] = ()

    def __post_init__(self) -> None:
        require_fields(self.options, EntropyConfig)


ENTROPY_CONTROLLERS: FunctionRegistry[EntropyRule, EntropyController] = FunctionRegistry(
    "entropy controller",
    key="algo.entropy.controller",
    entry=EntropyController,
    parameters=("state", "entropy_nats", "cfg"),
)


def next_entropy_state(state: EntropyState, entropy_nats: float, cfg: AlgoConfig) -> EntropyState:
    """Return the state for the next step from the configured controller; its coefficient is at most `max_coef`.

    The first step's state is `EntropyState(coef=algo.entropy_coef)`. Raises NonFiniteError for a non-finite entropy.

    >>> cfg = AlgoConfig(entropy_coef=0.5, entropy=EntropyConfig(controller="proportional", target_nats=1.0))
    >>> next_entropy_state(EntropyState(coef=0.5), 2.0, cfg).coef
    0.25
    """
    if not math.isfinite(entropy_nats):
        raise NonFiniteError(f"entropy: got {entropy_nats}, expected a finite number of nats; check the log-probs")
    state = ENTROPY_CONTROLLERS.get(cfg.entropy.controller).next_state(state, entropy_nats, cfg)
    bound = cfg.entropy.max_coef
    return state if bound is None else replace(state, coef=min(state.coef, bound))


@ENTROPY_CONTROLLERS.register("fixed")
def fixed(state: EntropyState, entropy_nats: float, cfg: AlgoConfig) -> EntropyState:
    """Keep the entropy coefficient unchanged.

    >>> fixed(EntropyState(coef=0.5), 2.0, AlgoConfig()).coef
    0.5
    """
    return state


@ENTROPY_CONTROLLERS.register("learned", options=("target_nats", "lr", "max_coef"))
def learned(state: EntropyState, entropy_nats: float, cfg: AlgoConfig) -> EntropyState:
    """Take one AdamW step of ln α on alpha_loss = (H − target)·α, whose gradient in ln α is (H − target)·α.

    α is the coefficient. SAC learns its temperature in this way (arXiv:1812.05905). Weight decay is 0, because it would
    pull α to 1. `next_entropy_state` bounds α by `max_coef`; α falls again once Adam's mean gradient is positive.

    >>> cfg = AlgoConfig(entropy=EntropyConfig(controller="learned", target_nats=1.0, lr=0.1))
    >>> round(learned(EntropyState(coef=1.0), 0.5, cfg).coef, 3)
    1.105
    """
    gradient = (entropy_nats - cfg.entropy.target_nats) * state.coef
    num_updates = state.num_updates + 1
    exp_avg = _BETA_1 * state.exp_avg + (1 - _BETA_1) * gradient
    exp_avg_sq = _BETA_2 * state.exp_avg_sq + (1 - _BETA_2) * gradient**2
    mean, mean_sq = exp_avg / (1 - _BETA_1**num_updates), exp_avg_sq / (1 - _BETA_2**num_updates)
    log_coef = math.log(state.coef) - cfg.entropy.lr * mean / (math.sqrt(mean_sq) + _EPS)
    return EntropyState(coef=math.exp(log_coef), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, num_updates=num_updates)


@ENTROPY_CONTROLLERS.register("proportional", options=("target_nats", "max_coef"))
def proportional(state: EntropyState, entropy_nats: float, cfg: AlgoConfig) -> EntropyState:
    """Set the coefficient to entropy_coef · target / H, with H at least 1e-4 nats; `next_entropy_state` bounds it.

    >>> cfg = AlgoConfig(entropy_coef=0.5, entropy=EntropyConfig(controller="proportional", target_nats=1.0))
    >>> proportional(EntropyState(coef=0.5), 2.0, cfg).coef
    0.25
    """
    scale = cfg.entropy.target_nats / max(entropy_nats, _MIN_ENTROPY_NATS)
    return EntropyState(coef=cfg.entropy_coef * scale)


def check_entropy(cfg: AlgoConfig) -> None:
    """Raise ConfigError for an unknown controller, and for settings that the controller does not read.

    >>> check_entropy(AlgoConfig(entropy=EntropyConfig(lr=0.1)))
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.entropy.lr: got 0.1, which is not read with algo.entropy.controller=fixed; ...
    """
    options = ENTROPY_CONTROLLERS.get(cfg.entropy.controller).options
    unread = [each for each in ("target_nats", "lr", "max_coef") if each not in options]
    situation = f"algo.entropy.controller={cfg.entropy.controller}"
    refuse_unused("algo.entropy", cfg.entropy, unread, situation, "set algo.entropy.controller=learned")
