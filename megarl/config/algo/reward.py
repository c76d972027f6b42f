"""Define the sections that shape rewards and filter groups (the samples of a prompt) before advantages are computed."""

from dataclasses import dataclass, field
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, Range, setting
from megarl.errors import ConfigError
from megarl.registry import refuse_unused


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMaskConfig:
    """Hide the rewards of some rows (samples); the critic's values take their place."""

    ratio: float = setting(0.0, FRACTION)  # Fraction of rows whose reward is hidden.
    # bernoulli: each row independently with probability ratio; fixed: exactly ⌊rows × ratio⌋ of them.
    kind: Literal["bernoulli", "fixed"] = "bernoulli"
    # Negate the advantages of masked rows; null: as true. It has no effect with algo.reward.source=critic.
    flip: bool | None = None
    flip_stage: Literal["before_whiten", "after_whiten"] = "after_whiten"  # Negate them before or after whitening.

    def check(self, key: str) -> None:
        """Raise ConfigError for settings of a mask that hides nothing."""
        if self.ratio == 0:
            refuse_unused(key, self, ("kind", "flip_stage"), f"{key}.ratio=0", f"set {key}.ratio > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Choose the source, shaping and masking of each sample's reward before advantages are computed."""

    # rule: the scorer's reward; critic: the critic's value of the last token.
    source: Literal["rule", "critic"] = "rule"
    clip: tuple[float, float] | None = None  # Lower and upper bound of the shaped reward; null: none.
    # Penalise responses linearly that end within this many tokens of the length limit; null: no penalty.
    overlong_buffer_tokens: int | None = setting(None, AT_LEAST_1)
    overlong_factor: float = setting(1.0, AT_LEAST_0)  # Penalty at the length limit.
    # Reward of a response truncated at the length limit, penalty included: a value ≥ 0 multiplies it, a value < 0
    # replaces it; null: neither.
    truncated: float | None = setting(None, Range(expected="any number, or null"))
    mask: RewardMaskConfig = field(default_factory=RewardMaskConfig)

    def check(self, key: str) -> None:
        """Raise ConfigError for bounds out of order, and for shaping that the source does not read."""
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ConfigError(f"{key}.clip: got {list(self.clip)}, expected [low, high] with low < high")
        if self.overlong_buffer_tokens is None:
            unset = f"{key}.overlong_buffer_tokens"
            refuse_unused(key, self, ("overlong_factor",), f"{unset}=null", f"set {unset}")
        if self.source == "critic":
            shaping = ("clip", "overlong_buffer_tokens", "truncated")
            refuse_unused(key, self, shaping, f"{key}.source=critic", f"set {key}.source=rule")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterConfig:
    """Choose which groups to train on, by their samples' correctness, scores or rewards; others can be replaced."""

    # The number of a sample that decides. correct: 1 for a right answer, 0 for a wrong one; score: the scorer's own
    # score, from 0 to 1, or the `scores` of a custom function or service; reward: the reward made of it, say -1 or 1.
    by: Literal["correct", "score", "reward"] = "correct"
    # Exclusive bounds of a group's mean, as in [0.0, 1.0]; null: no bounds.
    mean_score: tuple[float, float] | None = None
    # Discard groups whose numbers all equal one of these values, as in [0.0, 1.0].
    uniform_scores: tuple[float, ...] = setting((), Range(expected="any numbers"))
    # Further filters, by the names under which algo.plugins registered them; a group stays if all filters keep it.
    names: tuple[str, ...] = ()
    count_demonstrations: bool = True  # Count rows that start with a demonstration when a group is judged.
    # Replace discarded groups by sampling further prompts, with at most this many additional batches per step; 0:
    # do not replace them.
    max_refills: int = setting(0, AT_LEAST_0)
    max_skipped_steps: int = setting(10, AT_LEAST_1)  # End the run when this many steps in a row have no group left.

    def check(self, key: str) -> None:
        """Raise ConfigError for bounds that keep no group."""
        if self.mean_score is not None and self.mean_score[0] >= self.mean_score[1]:
            raise ConfigError(
                f"{key}.mean_score: got {list(self.mean_score)}, expected lower < upper bound, both exclusive; take "
                "for example [0.0, 1.0]"
            )
