"""Decide how much of a demonstration each sample of a prompt starts with, its prefix (LUFFY, arXiv:2504.14945).

Random numbers are hashes of seed, step, uid and sample index, so that a resumed run repeats them without saved state.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from megarl.config.algo import DemonstrationConfig
from megarl.errors import ConfigError
from megarl.registry import FunctionRegistry, require_fields
from megarl.types.seeds import uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A sample with a prefix: its step (from 1), and its index among the `count` such samples of its prompt."""

    step: int
    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRange:
    """The range from which a sample's share of the demonstration is drawn uniformly, before it is clamped to [0, 1]."""

    low: float
    high: float


# Name of the quantity that marks a row's demonstration tokens with 1.
DEMONSTRATION = "demonstration"
# Name of the quantity that holds the demonstrator's probabilities, -1 where unknown and on all other tokens.
TARGET_PROBS = "target_probs"

PrefixRangeOf: TypeAlias = Callable[[Slot, DemonstrationConfig], PrefixRange]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStrategy:
    """A rule for each sample's window; `options` are the fields of `DemonstrationConfig` that not all rules read."""

    window: PrefixRangeOf = field(kw_only=False)
    options: Collection[str] = ()

    def __post_init__(self) -> None:
        require_fields(self.options, DemonstrationConfig)


PREFIX_STRATEGIES: FunctionRegistry[PrefixRangeOf, PrefixStrategy] = FunctionRegistry(
    "prefix strategy", key="algo.demonstrations.strategy", entry=PrefixStrategy, parameters=("slot", "cfg")
)

# Stepped schedules divide decay_steps into this many equal parts, each with a constant window.
_NUM_WINDOWS = 10
# Keeps a product that should be a whole number, such as 0.29 · 100, from being rounded down to the one below.
_LENGTH_EPS = 1e-9


@PREFIX_STRATEGIES.register("none")
def none(slot: Slot, cfg: DemonstrationConfig) -> PrefixRange:
    """Use no part of the demonstration.

    >>> none(Slot(step=1, index=0, count=2), DemonstrationConfig())
    PrefixRange(low=0.0, high=0.0)
    """
    return PrefixRange(low=0.0, high=0.0)


@PREFIX_STRATEGIES.register("random", options=("min_ratio",))
def random(slot: Slot, cfg: DemonstrationConfig) -> PrefixRange:
    """Draw the share of the demonstration uniformly from [min_ratio, max_ratio].

    >>> cfg = DemonstrationConfig(min_ratio=0.25, max_ratio=1.0, decay_steps=10)
    >>> random(Slot(step=1, index=0, count=2), cfg)
    PrefixRange(low=0.25, high=1.0)
    """
    return PrefixRange(low=cfg.min_ratio, high=cfg.max_ratio)


@PREFIX_STRATEGIES.register("linear", options=("decay_steps",))
def linear(slot: Slot, cfg: DemonstrationConfig) -> PrefixRange:
    """Let the share of the demonstration fall linearly: max_ratio · (1 − min(s / decay_steps, 1)) with s = step − 1.

    >>> cfg = DemonstrationConfig(min_ratio=0.25, max_ratio=1.0, decay_steps=10)
    >>> linear(Slot(step=6, index=1, count=2), cfg)
    PrefixRange(low=0.5, high=0.5)
    """
    ratio = cfg.max_ratio * (1 - min((slot.step - 1) / cfg.decay_steps, 1.0))
    return PrefixRange(low=ratio, high=ratio)


@PREFIX_STRATEGIES.register("linear_max", options=("decay_steps",))
def linear_max(slot: Slot, cfg: DemonstrationConfig) -> PrefixRange:
    """Draw the share from U[0, (10 − j)·max_ratio / 10], with j from 0 to 9 the current tenth of decay_steps (then 9).

    >>> cfg = DemonstrationConfig(min_ratio=0.25, max_ratio=1.0, decay_steps=10)
    >>> linear_max(Slot(step=1, index=0, count=2), cfg)
    PrefixRange(low=0.0, high=1.0)
    """
    return PrefixRange(low=0.0, high=(_NUM_WINDOWS - _tenth(slot.step, cfg)) * cfg.max_ratio / _NUM_WINDOWS)


@PREFIX_STRATEGIES.register("reverse_linear", options=("decay_steps",))
def reverse_linear(slot: Slot, cfg: DemonstrationConfig) -> PrefixRange:
    """Draw the share from U[0, (j + 1)·max_ratio / 10], with j from 0 to 9 the current tenth of decay_steps (then 9).

    >>> cfg = DemonstrationConfig(min_ratio=0.25, max_ratio=1.0, decay_steps=10)
    >>> reverse_linear(Slot(step=6, index=1, count=2), cfg)
    PrefixRange(low=0.0, high=0.5)
    """
    return PrefixRange(low=0.0, high=(_tenth(slot.step, cfg) + 1) * cfg.max_ratio / _NUM_WINDOWS)


@PREFIX_STRATEGIES.register("fixed", options=("min_ratio",))
def fixed(slot: Slot, cfg: DemonstrationConfig) -> PrefixRange:
    """Space the shares of a prompt's prefixed samples evenly from min_ratio to max_ratio; a single one gets max_ratio.

    >>> cfg = DemonstrationConfig(min_ratio=0.25, max_ratio=1.0, decay_steps=10)
    >>> fixed(Slot(step=1, index=0, count=2), cfg), fixed(Slot(step=6, index=1, count=2), cfg)
    (PrefixRange(low=0.25, high=0.25), PrefixRange(low=1.0, high=1.0))
    """
    spread = cfg.max_ratio - cfg.min_ratio
    ratio = cfg.max_ratio if slot.count == 1 else cfg.min_ratio + spread * slot.index / (slot.count - 1)
    return PrefixRange(low=ratio, high=ratio)


@PREFIX_STRATEGIES.register("linear_variance", options=("decay_steps", "variance"))
def linear_variance(slot: Slot, cfg: DemonstrationConfig) -> PrefixRange:
    """Draw the share from U[v − variance, v + variance], where v is the share that `linear` computes.

    >>> cfg = DemonstrationConfig(max_ratio=1.0, decay_steps=10, variance=0.25)
    >>> linear_variance(Slot(step=6, index=1, count=2), cfg)
    PrefixRange(low=0.25, high=0.75)
    """
    middle = linear(slot, cfg).low
    return PrefixRange(low=middle - cfg.variance, high=middle + cfg.variance)


def _tenth(step: int, cfg: DemonstrationConfig) -> int:
    """Return in which tenth of decay_steps (0 to 9) s = step − 1 lies; a boundary belongs to the earlier tenth."""
    elapsed = (step - 1) * _NUM_WINDOWS
    return min(max(-(-elapsed // cfg.decay_steps) - 1, 0), _NUM_WINDOWS - 1)


def num_prefixed(cfg: DemonstrationConfig, num_samples: int) -> int:
    """Return how many samples of a prompt, from the first, get a prefix; ConfigError if it exceeds `num_samples`.

    >>> num_prefixed(DemonstrationConfig(num_prefixed=-1), 8)
    8
    """
    if cfg.num_prefixed > num_samples:
        raise ConfigError(
            f"algo.demonstrations.num_prefixed: got {cfg.num_prefixed}, expected <= rollout.num_samples={num_samples}; "
            f"lower it, or set -1 for all"
        )
    return num_samples if cfg.num_prefixed == -1 else cfg.num_prefixed


def prefix_ratios(
    cfg: DemonstrationConfig, *, uid: str, step: int, num_samples: int, run_seed: int
) -> tuple[float, ...]:
    """Return the share of the demonstration that each sample of a prompt starts with; 0 for samples without a prefix.

    A random share depends on run_seed, step, uid and, unless `shared` is set, the sample index.

    >>> cfg = DemonstrationConfig(strategy="fixed", min_ratio=0.5, max_ratio=1.0, num_prefixed=2)
    >>> prefix_ratios(cfg, uid="a", step=1, num_samples=3, run_seed=0)
    (0.5, 1.0, 0.0)
    """
    count = num_prefixed(cfg, num_samples)
    strategy = PREFIX_STRATEGIES.get(cfg.strategy)
    ratios = []
    for i in range(count):
        window = strategy.window(Slot(step=step, index=i, count=count), cfg)
        draw = uniform("ratio", run_seed, step, uid, 0 if cfg.shared else i)
        ratios.append(min(max(window.low + (window.high - window.low) * draw, 0.0), 1.0))
    return (*ratios, *[0.0] * (num_samples - count))


def prefix_length(num_tokens: int, ratio: float) -> int:
    """Return the prefix length ⌊num_tokens · ratio⌋, where `num_tokens` counts the demonstration and its end token.

    >>> prefix_length(100, 0.29)
    29
    """
    return math.floor(num_tokens * ratio + _LENGTH_EPS)


def keeps_demonstration(cfg: DemonstrationConfig, *, uid: str, run_seed: int) -> bool:
    """Return whether a prompt may use its demonstration: a share `keep_frac` of prompts, the same in every epoch.

    >>> keeps_demonstration(DemonstrationConfig(keep_frac=1.0), uid="a", run_seed=0)
    True
    """
    return uniform("keep", run_seed, uid) < cfg.keep_frac
