"""Check that the settings of demonstrations agree with the settings of the loss on them."""

import warnings
from collections.abc import Mapping
from dataclasses import fields

from megarl.algos.prefixes import PREFIX_STRATEGIES
from megarl.algos.reshape import (
    DEMONSTRATION_RESHAPES,
    RATIO_RESHAPES,
    ReshapeMaker,
    ReshapeRule,
    demonstration_reshape,
    ratio_reshape,
)
from megarl.config.algo import AlgoConfig, DemonstrationConfig
from megarl.errors import ConfigError
from megarl.registry import FunctionRegistry, readers_of, refuse_unused

_DEMONSTRATIONS, _OFF_POLICY = "algo.demonstrations", "algo.off_policy"
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
# Settings of algo.off_policy that change nothing without demonstrations.
_NEED_DEMONSTRATIONS = ("loss", "demonstration_weight", "prefix_reward", "only_positive")
# Of each setting of algo.off_policy that chooses a reshape, the reshapes; what they read is called after the setting.
_RESHAPES: Mapping[str, FunctionRegistry[ReshapeMaker, ReshapeRule]] = {
    "reshape": DEMONSTRATION_RESHAPES,
    "on_policy_reshape": RATIO_RESHAPES,
}


def check_luffy(cfg: AlgoConfig) -> None:
    """Raise ConfigError for unknown names and contradictions, and warn about settings that have little effect.

    >>> demonstrations = DemonstrationConfig(strategy="random", min_ratio=0.9, max_ratio=0.1)
    >>> check_luffy(AlgoConfig(demonstrations=demonstrations))
    Traceback (most recent call last):
        ...
    megarl.errors.ConfigError: algo.demonstrations.min_ratio: got 0.9, expected <= max_ratio=0.1; swap them
    """
    PREFIX_STRATEGIES.get(cfg.demonstrations.strategy)
    demonstration_reshape(cfg.off_policy)
    ratio_reshape(cfg.off_policy)
    _check_demonstrations(cfg)
    _check_off_policy(cfg)


def _check_demonstrations(cfg: AlgoConfig) -> None:
    demonstrations, off_policy = cfg.demonstrations, cfg.off_policy
    strategy, count = demonstrations.strategy, demonstrations.num_prefixed
    if strategy == "fixed" and demonstrations.shared:
        raise ConfigError(
            "algo.demonstrations.shared: got true with strategy=fixed, which gives each sample of a prompt a ratio of "
            "its own; set shared=false, or another strategy"
        )
    if strategy == "linear" and not demonstrations.shared:
        raise ConfigError(
            "algo.demonstrations.shared: got false with strategy=linear, whose ratio depends on the step alone; "
            "set shared=true, or strategy=linear_variance for ratios around it"
        )
    low, high = demonstrations.min_ratio, demonstrations.max_ratio
    if low > high:
        raise ConfigError(f"algo.demonstrations.min_ratio: got {low}, expected <= max_ratio={high}; swap them")
    if strategy == DemonstrationConfig().strategy:
        others = (field.name for field in fields(demonstrations) if field.name != "strategy")
        situation, remedy = f"{_DEMONSTRATIONS}.strategy=none", f"choose another {_DEMONSTRATIONS}.strategy"
        refuse_unused(_DEMONSTRATIONS, demonstrations, others, situation, remedy)
        refuse_unused(_OFF_POLICY, off_policy, _NEED_DEMONSTRATIONS, situation, remedy)
    elif count == 0:
        situation, remedy = f"{_DEMONSTRATIONS}.num_prefixed=0", f"raise {_DEMONSTRATIONS}.num_prefixed"
        refuse_unused(_OFF_POLICY, off_policy, _NEED_DEMONSTRATIONS, situation, remedy)
    for name, readers in readers_of(PREFIX_STRATEGIES).items():
        if strategy not in readers:
            remedy = f"set strategy={' or '.join(readers)}"
            refuse_unused(_DEMONSTRATIONS, demonstrations, (name,), f"strategy={strategy}", remedy)
    if off_policy.prefix_reward is not None and count != -1:
        raise ConfigError(
            f"algo.off_policy.prefix_reward: is set with algo.demonstrations.num_prefixed={count}, expected -1, as it "
            f"shares one reward among all samples of a prompt; set num_prefixed=-1, or prefix_reward=null"
        )
    if demonstrations.max_group_accuracy is not None and count == -1:
        raise ConfigError(
            "algo.demonstrations.max_group_accuracy: is set with num_prefixed=-1, which leaves no sample without a "
            "demonstration to measure the accuracy on; set num_prefixed below rollout.num_samples"
        )


def _check_off_policy(cfg: AlgoConfig) -> None:
    off_policy = cfg.off_policy
    least, most = off_policy.min_clip, off_policy.max_clip
    if least is not None and most is not None and least > most:
        raise ConfigError(f"algo.off_policy.min_clip: got {least}, expected <= max_clip={most}; swap them")
    # Imitation and LUFFY's loss are alternatives: each refuses the settings of the other.
    for loss, names in (("luffy", _ONLY_LUFFY), ("sft", _ONLY_SFT)):
        if off_policy.loss != loss:
            refuse_unused(_OFF_POLICY, off_policy, names, f"loss={off_policy.loss}", f"set loss={loss}")
    for key, registry in _RESHAPES.items():
        reshape = getattr(off_policy, key)
        for option, readers in readers_of(registry).items():
            if reshape not in readers:
                remedy = f"set {key}={' or '.join(readers)}"
                refuse_unused(_OFF_POLICY, off_policy, (f"{key}_{option}",), f"{key}={reshape}", remedy)
    if off_policy.loss == "luffy" and cfg.policy_loss.name != "ppo_clip":
        raise ConfigError(
            f"algo.policy_loss.name: got {cfg.policy_loss.name!r} with algo.off_policy.loss=luffy, which brings a "
            f"clipped surrogate of its own; set ppo_clip, whose clip range it uses"
        )
    if off_policy.target_probs and off_policy.reshape != "no_reshape":
        warnings.warn(
            f"algo.off_policy.reshape={off_policy.reshape} acts only on demonstration tokens without a probability, "
            f"as target_probs=true divides by the others'",
            stacklevel=3,
        )
    if off_policy.on_policy_reshape == "logp" and not off_policy.remove_clip:
        warnings.warn(
            "algo.off_policy.on_policy_reshape=logp is about 0 where a ratio is about 1, outside of the clip range; "
            "set remove_clip=true",
            stacklevel=3,
        )
