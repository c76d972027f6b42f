"""LUFFY: demonstrations as prefixes of samples, and the loss on their tokens."""

from dataclasses import dataclass
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, SHARE, Range, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationConfig:
    """How much of a demonstration the samples of a prompt start with."""

    # none | random | linear | linear_max | reverse_linear | fixed | linear_variance; see docs/algorithms.md.
    strategy: str = "none"
    # Samples of a group that get a prefix, the first ones; -1: all.
    num_prefixed: int = setting(-1, Range(expected=">= 0, or -1 for all", at_least=0, also=-1))
    shared: bool = False  # One ratio for all prefixed samples of a prompt.
    min_ratio: float = setting(0.0, FRACTION)  # Least share of the demonstration.
    max_ratio: float = setting(0.8, FRACTION)  # Largest share.
    decay_steps: int = setting(300, AT_LEAST_1)  # Steps over which the schedules run.
    variance: float = setting(0.1, FRACTION)  # linear_variance: half-width around the linear schedule.
    # Longer demonstrations, not counting the end token, are cut and get none.
    max_tokens: int = setting(8192, AT_LEAST_1)
    on_long: Literal["cut", "drop"] = "cut"  # drop: a longer demonstration is not used.
    # Probability with which a prompt keeps its demonstration, the same in every epoch.
    keep_frac: float = setting(1.0, FRACTION)
    # A prompt uses its demonstration only if its other samples' accuracy is at most this; null: always.
    max_group_accuracy: float | None = setting(None, FRACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyConfig:
    """The loss on demonstration tokens, and what LUFFY changes on the others."""

    # luffy: −A·f(π) without an old policy; sft: rows with a prefix are imitated; none: as all other tokens.
    loss: Literal["none", "luffy", "sft"] = "none"
    reshape: str = "p_div_p_0.5"  # f on demonstration tokens; p_div_p_C takes any C. See docs/algorithms.md.
    reshape_weight: float = setting(0.1, POSITIVE)  # Weight of the logarithm in logp and p_logp.
    reshape_exponent: float = setting(0.5, POSITIVE)  # Exponent of pow.
    on_policy_reshape: str = "no_reshape"  # Applied to the ratio of the other tokens.
    on_policy_reshape_weight: float = setting(0.1, POSITIVE)  # Weight of the logarithm in p_logp.
    on_policy_reshape_exponent: float = setting(0.5, POSITIVE)  # As reshape_exponent.
    max_clip: float | None = setting(None, POSITIVE)  # Upper bound of f; null: none.
    min_clip: float | None = setting(None, POSITIVE)  # Lower bound of f; null: none.
    # Tokens that the old policy gives a probability above this train nothing and are not counted; null: none.
    drop_above: float | None = setting(None, SHARE)
    clip_upper_bound: float = setting(100.0, POSITIVE)  # Upper clip of on-policy ratios where it exceeds 1 + clip_high.
    remove_clip: bool = False  # On-policy ratios are not clipped, also not by dual_clip.
    # Divide by the demonstrator's probabilities where the data has them (column target_probs), without reshape.
    target_probs: bool = False
    demonstration_weight: float = setting(1.0, AT_LEAST_0)  # α: factor of advantages on demonstration tokens.
    policy_weight: float = setting(1.0, AT_LEAST_0)  # β: factor of advantages on all other tokens.
    only_positive: bool = False  # Negative advantages on demonstration tokens become 0.
    # Advantages of rows cut at the length limit become 0.
    drop_truncated: bool = False
    # Advantages on demonstration tokens become this / group size; null: they stay.
    prefix_reward: float | None = setting(None, Range(expected="any number, or null"))
    sft_coef: float = setting(0.1, AT_LEAST_0)  # Weight of the imitation loss of loss=sft.
    # sft: imitate the demonstration only, or the whole row that starts with it.
    sft_tokens: Literal["demonstration", "row"] = "demonstration"
