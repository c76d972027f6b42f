"""Define the sections of LUFFY: samples that start with part of a demonstration, and the loss on those tokens."""

from dataclasses import dataclass
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, SHARE, Range, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationConfig:
    """Choose which samples of a prompt start with a prefix of the prompt's demonstration, and the prefix's length."""

    # none | random | linear | linear_max | reverse_linear | fixed | linear_variance; see docs/algorithms.md.
    strategy: str = "none"
    # Number of samples of a group, counted from the first, that start with a prefix of the demonstration; -1:
    # all.
    num_prefixed: int = setting(-1, Range(expected=">= 0, or -1 for all", at_least=0, also=-1))
    shared: bool = False  # Use the same ratio for all prefixed samples of a prompt.
    min_ratio: float = setting(0.0, FRACTION)  # Smallest fraction of the demonstration that a prefix has.
    max_ratio: float = setting(0.8, FRACTION)  # Largest fraction of the demonstration that a prefix has.
    decay_steps: int = setting(300, AT_LEAST_1)  # Number of steps over which the schedules run.
    variance: float = setting(0.1, FRACTION)  # linear_variance: half-width of the interval around the linear schedule.
    # Maximum length of a demonstration, not counting its end token; a demonstration that is cut gets no end token.
    max_tokens: int = setting(8192, AT_LEAST_1)
    on_long: Literal["cut", "drop"] = "cut"  # cut: truncate a longer demonstration; drop: do not use it.
    # Probability that a prompt uses its demonstration; the choice is the same in every epoch.
    keep_frac: float = setting(1.0, FRACTION)
    # Use a prompt's demonstration only if the accuracy of its other samples is at most this; null: always.
    max_group_accuracy: float | None = setting(None, FRACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyConfig:
    """Choose the loss on demonstration tokens, and LUFFY's changes to the loss on all other tokens."""

    # luffy: −A·f(π) without an old policy; sft: imitation of rows with a prefix; none: the same loss as on other
    # tokens.
    loss: Literal["none", "luffy", "sft"] = "none"
    reshape: str = "p_div_p_0.5"  # f on demonstration tokens; p_div_p_C takes any number C. See docs/algorithms.md.
    reshape_weight: float = setting(0.1, POSITIVE)  # Weight of the logarithm in logp and p_logp.
    reshape_exponent: float = setting(0.5, POSITIVE)  # Exponent of pow.
    on_policy_reshape: str = "no_reshape"  # Function applied to the ratio of all other tokens.
    on_policy_reshape_weight: float = setting(0.1, POSITIVE)  # Weight of the logarithm in p_logp for all other tokens.
    on_policy_reshape_exponent: float = setting(0.5, POSITIVE)  # Exponent of pow for all other tokens.
    max_clip: float | None = setting(None, POSITIVE)  # Upper bound of f; null: none.
    min_clip: float | None = setting(None, POSITIVE)  # Lower bound of f; null: none.
    # Exclude tokens to which the old policy gives a probability above this from the loss and from its token
    # counts; null: none.
    drop_above: float | None = setting(None, SHARE)
    clip_upper_bound: float = setting(100.0, POSITIVE)  # Upper clip of on-policy ratios, if it exceeds 1 + clip_high.
    remove_clip: bool = False  # Do not clip on-policy ratios, not even by dual_clip.
    # Divide by the demonstrator's probabilities (column target_probs) where the data has them, without reshape.
    target_probs: bool = False
    demonstration_weight: float = setting(1.0, AT_LEAST_0)  # α: factor on advantages of demonstration tokens.
    policy_weight: float = setting(1.0, AT_LEAST_0)  # β: factor on advantages of all other tokens.
    only_positive: bool = False  # Set negative advantages on demonstration tokens to 0.
    drop_truncated: bool = False  # Set the advantages of rows truncated at the length limit to 0.
    # Set advantages on demonstration tokens to this / group size; null: leave them.
    prefix_reward: float | None = setting(None, Range(expected="any number, or null"))
    sft_coef: float = setting(0.1, AT_LEAST_0)  # Weight of the imitation loss with loss=sft.
    # sft: imitate the demonstration only, or the whole row that starts with it.
    sft_tokens: Literal["demonstration", "row"] = "demonstration"
