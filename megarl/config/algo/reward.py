"""What happens to rewards before advantages, and which groups train."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, Range, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMaskConfig:
    """Rows whose reward is hidden, so that the critic's values stand in for it."""

    ratio: float = setting(0.0, FRACTION)  # Share of rows whose reward is hidden.
    # bernoulli: each row by chance; fixed: ⌊rows × ratio⌋ of them.
    kind: Literal["bernoulli", "fixed"] = "bernoulli"
    flip: bool | None = None  # The sign of masked rows' advantages is turned; null: with source=rule.
    flip_stage: Literal["before_whiten", "after_whiten"] = "after_whiten"  # When it is turned.


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """The reward of a row before the advantage: shaping, its source, and which rows hide it."""

    # rule: the scorer; critic: the critic's value of the last token.
    source: Literal["rule", "critic"] = "rule"
    clip: tuple[float, float] | None = None  # Bounds of the shaped reward; null: none.
    # A response that ends within this many tokens of the limit is penalised linearly; null: none.
    overlong_buffer_tokens: int | None = setting(None, AT_LEAST_1)
    overlong_factor: float = setting(1.0, AT_LEAST_0)  # The penalty at the limit.
    # Reward of a response cut at the limit, penalty included: ≥ 0 multiplies it, < 0 replaces it; null: neither.
    truncated: float | None = setting(None, Range(expected="any number, or null"))
    mask: RewardMaskConfig = field(default_factory=RewardMaskConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterConfig:
    """Which groups train, judged by the scorer's scores; removed groups are replaced if asked for."""

    # Bounds of a group's mean score, exclusive, as in [0.0, 1.0]; null: every group trains.
    mean_score: tuple[float, float] | None = None
    # Groups of which every score is one of these are removed, each value for itself, as in [0.0, 1.0].
    uniform_scores: tuple[float, ...] = setting((), Range(expected="any numbers"))
    # Whether rows that begin with a demonstration count where a group is judged.
    count_demonstrations: bool = True
    # Removed groups are replaced by sampling further prompts, at most this many batches a step; 0: they are not.
    max_refills: int = setting(0, AT_LEAST_0)
