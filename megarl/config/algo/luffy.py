"""Define the sections of LUFFY: samples that start with part of a demonstration, and the loss on those tokens."""

import warnings
from dataclasses import dataclass, fields
from typing import Literal

from megarl.config.setting import AT_LEAST_0, AT_LEAST_1, FRACTION, POSITIVE, SHARE, Range, setting
from megarl.errors import ConfigError
from megarl.registry import refuse_unused

# Settings of algo.off_policy that only one kind of loss reads.
_ONLY_LUFFY = (
    "reshape",
    "reshape_weight",
    "reshape_exponent",
    "on_policy_reshape",
    "on_policy_reshape_weight",
    "on_policy_reshape_exponent",
    "max_clip",
    "min_clip",
    "drop_above",
    "clip_upper_bound",
    "remove_clip",
    "target_probs",
)
_ONLY_SFT = ("sft_coef", "sft_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationConfig:
    """Choose which samples of a prompt start with a prefix of the prompt's demonstration, and the prefix's length."""

    # none | random | linear | linear_max | reverse_linear | fixed | linear_variance; see docs/algorithms/luffy.md.
    strategy: str = "none"
    # Who writes demonstrations. data: the column data.target_key; teacher: the prompt's teacher, when the prompt is
    # sampled.
    source: Literal["data", "teacher"] = "data"
    # Number of samples of a group, counted from the first, that start with a prefix of the demonstration; -1: all.
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

    def check(self, key: str) -> None:
        """Raise ConfigError for ratios that the strategy cannot give, and for settings that nothing reads."""
        if self.strategy == "fixed" and self.shared:
            raise ConfigError(
                f"{key}.shared: got true with strategy=fixed, which gives each sample of a prompt a ratio of its own; "
                "set shared=false, or another strategy"
            )
        if self.strategy == "linear" and not self.shared:
            raise ConfigError(
                f"{key}.shared: got false with strategy=linear, whose ratio depends on the step alone; set "
                "shared=true, or strategy=linear_variance for ratios around it"
            )
        if self.min_ratio > self.max_ratio:
            raise ConfigError(
                f"{key}.min_ratio: got {self.min_ratio}, expected <= max_ratio={self.max_ratio}; swap them"
            )
        if self.strategy == "none":
            others = (each.name for each in fields(self) if each.name != "strategy")
            refuse_unused(key, self, others, f"{key}.strategy=none", f"choose another {key}.strategy")
        if self.max_group_accuracy is not None and self.num_prefixed == -1:
            raise ConfigError(
                f"{key}.max_group_accuracy: is set with num_prefixed=-1, which leaves no sample without a "
                "demonstration to measure the accuracy on; set num_prefixed below rollout.num_samples"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyConfig:
    """Choose the loss on demonstration tokens, and LUFFY's changes to the loss on all other tokens."""

    # luffy: −A·f(π) without an old policy; sft: imitation of rows with a prefix; none: the same loss as on other
    # tokens.
    loss: Literal["none", "luffy", "sft"] = "none"
    reshape: str = "p_div_p_0.5"  # f on demonstration tokens; p_div_p_C takes any C > 0. See docs/algorithms/luffy.md.
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

    def check(self, key: str) -> None:
        """Raise ConfigError for bounds out of order and settings of another loss; warn of those with little effect."""
        least, most = self.min_clip, self.max_clip
        if least is not None and most is not None and least > most:
            raise ConfigError(f"{key}.min_clip: got {least}, expected <= max_clip={most}; swap them")
        # Imitation and LUFFY's loss are alternatives: each refuses the settings of the other.
        for loss, names in (("luffy", _ONLY_LUFFY), ("sft", _ONLY_SFT)):
            if self.loss != loss:
                refuse_unused(key, self, names, f"loss={self.loss}", f"set loss={loss}")
        if self.target_probs and self.reshape != "no_reshape":
            warnings.warn(
                f"algo.off_policy.reshape={self.reshape} acts only on demonstration tokens without a probability, as "
                "target_probs=true divides by the others'",
                stacklevel=3,
            )
        if self.on_policy_reshape == "logp" and not self.remove_clip:
            warnings.warn(
                "algo.off_policy.on_policy_reshape=logp is about 0 where a ratio is about 1, outside of the clip "
                "range; set remove_clip=true",
                stacklevel=3,
            )
