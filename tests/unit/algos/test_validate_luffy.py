"""Settings of demonstrations that do not agree are refused before a run."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.algos.entropy import check_entropy
from megarl.algos.validate_luffy import check_luffy
from megarl.config.algo import AlgoConfig, DemonstrationConfig, OffPolicyConfig, PolicyLossConfig
from megarl.config.parse import from_dict
from megarl.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs" / "algo"
RANDOM = DemonstrationConfig(strategy="random")


def config(
    demonstrations: DemonstrationConfig = RANDOM, policy_loss: str = "ppo_clip", **off_policy: Any
) -> AlgoConfig:
    return AlgoConfig(
        demonstrations=demonstrations,
        off_policy=OffPolicyConfig(**off_policy),
        policy_loss=PolicyLossConfig(name=policy_loss),
    )


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            config(DemonstrationConfig(strategy="fixed", shared=True)),
            "algo.demonstrations.shared: got true with strategy=fixed",
        ),
        (
            config(DemonstrationConfig(strategy="linear")),
            "algo.demonstrations.shared: got false with strategy=linear",
        ),
        (
            config(DemonstrationConfig(strategy="random", min_ratio=0.9)),
            "algo.demonstrations.min_ratio: got 0.9, expected <= max_ratio=0.8",
        ),
        (
            config(loss="luffy", min_clip=2.0, max_clip=1.0),
            "algo.off_policy.min_clip: got 2.0, expected <= max_clip=1.0",
        ),
        (
            config(DemonstrationConfig(strategy="random", num_prefixed=4), prefix_reward=1.0),
            "algo.off_policy.prefix_reward: is set with algo.demonstrations.num_prefixed=4, expected -1",
        ),
        (
            config(DemonstrationConfig(strategy="random", max_group_accuracy=0.5)),
            "algo.demonstrations.max_group_accuracy: is set with num_prefixed=-1",
        ),
        (
            config(loss="sft", reshape="p_div_p_0.1"),
            "algo.off_policy.reshape: got 'p_div_p_0.1' with loss=sft, expected loss=luffy, as it would not act",
        ),
        (config(drop_above=0.9), "algo.off_policy.drop_above: got 0.9 with loss=none, expected loss=luffy"),
        (
            config(loss="luffy", sft_coef=0.5),
            "algo.off_policy.sft_coef: got 0.5 with loss=luffy, expected loss=sft, as it would not act; "
            "set sft_coef=0.1, or change the other",
        ),
        (
            config(DemonstrationConfig(), loss="luffy"),
            "algo.off_policy.loss: got 'luffy' with algo.demonstrations.strategy=none, expected another strategy",
        ),
        (
            config(DemonstrationConfig(), prefix_reward=1.0),
            "algo.off_policy.prefix_reward: got 1.0 with algo.demonstrations.strategy=none",
        ),
        (
            config(policy_loss="gspo", loss="luffy"),
            "algo.policy_loss.name: got 'gspo' with algo.off_policy.loss=luffy",
        ),
        (config(DemonstrationConfig(strategy="ramp")), "unknown prefix strategy 'ramp'"),
        (config(loss="luffy", reshape="p_div"), "algo.off_policy.reshape: unknown reshape 'p_div'"),
        (config(loss="luffy", on_policy_reshape="x"), "algo.off_policy.on_policy_reshape: unknown reshape 'x'"),
    ],
)
def test_conflicts_are_refused(cfg: AlgoConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_luffy(cfg)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (config(loss="luffy", target_probs=True), "reshape=p_div_p_0.5 acts only on demonstration tokens without"),
        (config(loss="luffy", on_policy_reshape="logp"), "on_policy_reshape=logp is about 0 where a ratio is about 1"),
    ],
)
def test_settings_that_hardly_act_are_warned_of(cfg: AlgoConfig, message: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(message)):
        check_luffy(cfg)


@pytest.mark.parametrize(
    "cfg",
    [
        AlgoConfig(),
        config(loss="luffy"),
        config(loss="sft", policy_loss="gspo"),
        config(DemonstrationConfig(strategy="linear", shared=True), loss="luffy", prefix_reward=1.0),
        config(loss="luffy", on_policy_reshape="logp", remove_clip=True),
        config(loss="luffy", target_probs=True, reshape="no_reshape"),
        config(DemonstrationConfig(strategy="fixed", num_prefixed=1, max_group_accuracy=0.5), loss="luffy"),
    ],
)
def test_settings_that_agree_pass(cfg: AlgoConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_luffy(cfg)


@pytest.mark.parametrize("name", ["luffy", "luffy_prefix", "luffy_sft"])
def test_the_files_of_configs_pass(name: str) -> None:
    body = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    cfg = from_dict(AlgoConfig, body["algo"], "algo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_luffy(cfg)
        check_entropy(cfg)
