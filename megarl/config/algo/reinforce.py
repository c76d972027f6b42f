"""Define the settings of the advantage estimator, and of the correction for log-probs that differ from the engine's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megarl.config.setting import ANY_NUMBER, AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, SHARE, Range, section, setting
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Choose the estimator that turns rewards into advantages, and its options."""

    estimator: str = "grpo"  # Name of the advantage estimator; see docs/algorithms.md.
    # grpo, grpo_split, gdpo, passk_best: divide by the group's standard deviation; reinforce_plus_plus,
    # reinforce_baseline: by the batch's.
    norm_by_std: bool = True
    # reinforce_baseline: subtract the batch's token-weighted mean, which gives groups of equal rewards a learning
    # signal.
    center: bool = True
    # reinforce_baseline: exclude groups of equal rewards from the batch's statistics, and do not centre them.
    exclude_equal_groups: bool = False
    # reinforce_max: train groups of equal rewards r with advantage r / group size instead of 0.
    uniform_scale: bool = False
    # gdpo: weights of the components of the reward, by name, as in {correct: 1.0, format: 0.5}. A component is a detail
    # that the scorer reports, score (the reward itself), or correct (1 for a right answer, 0 for a wrong one). A weight
    # of 0 takes a component away.
    components: Mapping[str, float] = section(dict, ANY_NUMBER)
    k: int = setting(4, AT_LEAST_1)  # passk: number of samples of which one has to be right.
    # gae, reinforce_plus_plus: discount per token; turn_returns, tree_returns: per turn; others require 1.
    gamma: float = setting(1.0, SHARE)
    lam: float = setting(1.0, FRACTION)  # gae: λ of the actor's advantages.
    lam_critic: float | None = setting(None, FRACTION)  # gae: λ of the critic's returns; null: lam.
    # gae, critic_value: normalise advantages to mean 0 and variance 1 over the batch's loss tokens.
    whiten: bool = True
    # gae, turn_returns: which rewards a token of a conversation that branches gets. written: all that came later;
    # path: those of the turns that go on from it. See docs/algorithms/advantages.md.
    credit: Literal["written", "path"] = "written"
    # otb: which rows of a group are compared: those that have a token at this place of the response, or as many loss
    # tokens before it (where tools answer, these differ).
    places: Literal["response", "loss"] = "response"
    weight_cap: float | None = setting(None, POSITIVE)  # otb: count tokens by min(ρ, this)²; null: all alike.


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """Weight the policy loss to correct for differences between the engine's log-probs and the trainer's.

    Each token has the ratio ρ = exp(old_logprobs − rollout_logprobs); how `low` and `high` bound it depends on `name`.
    """

    name: str = "none"  # Name of the correction; see docs/algorithms.md.
    # With name=none: train on stale samples (rollout.schedule.staleness) as if they were fresh, to see what that costs.
    forced: bool = False
    low: float = setting(0.5, AT_LEAST_0)  # Lower threshold, inclusive; at most 1.
    high: float = setting(5.0, POSITIVE)  # Upper threshold, inclusive; at least 1.
    max_kl_nats: float = setting(0.1, POSITIVE)  # sequence_mask: mask rows whose mean of −ln ρ exceeds this.
    # m2po: mask the tokens of the largest (ln ρ)², as few as bring the mean of those of a step below this.
    max_second_moment: float = setting(0.04, POSITIVE)
    # Upper bound of the weights of tokens that the gate (the rule that rejects tokens) accepts; null: none.
    token_cap: float | None = setting(None, POSITIVE)
    # Give weight 0 to rows that have a token with ρ above this or below its inverse; null: none.
    veto: float | None = setting(None, Range(expected="> 1, or null for none", above=1))
    only_negative: bool = False  # Let the gate reject only tokens of negative advantage.
    normalise: bool = False  # Divide the weights of a step by their mean over the tokens that the engine sampled.

    def check(self, key: str) -> None:
        """Raise ConfigError for bounds that reject a ratio of 1."""
        if not (self.low < self.high and self.low <= 1 <= self.high):
            raise ConfigError(
                f"{key}.low and {key}.high: got {self.low} and {self.high}, expected low <= 1 <= high and low < high, "
                "as a ratio of 1 is perfect agreement; take for example 0.5 and 5.0"
            )
