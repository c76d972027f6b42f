"""Settings of demonstrations that do not agree are refused before a run."""

import re
import warnings
from typing import Any

import pytest

from megarl.algos.validate import check_algo_config
from megarl.config.algo import AlgoConfig, DemonstrationConfig, OffPolicyConfig, PolicyLossConfig
from megarl.errors import ConfigError

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
            "algo.off_policy.reshape: got p_div_p_0.1, which is not read with loss=sft; leave it at p_div_p_0.5, or "
            "set loss=luffy",
        ),
        (
            config(loss="luffy", reshape="p_logp", reshape_exponent=2.0),
            "algo.off_policy.reshape_exponent: got 2.0, which is not read with reshape=p_logp; leave it at 0.5, or "
            "set reshape=pow",
        ),
        (
            config(loss="luffy", reshape="pow", on_policy_reshape_exponent=2.0),
            "algo.off_policy.on_policy_reshape_exponent: got 2.0, which is not read with on_policy_reshape=no_reshape",
        ),
        (
            config(DemonstrationConfig(strategy="linear_max", min_ratio=0.1)),
            "algo.demonstrations.min_ratio: got 0.1, which is not read with strategy=linear_max; leave it at 0.0, or "
            "set strategy=random or fixed",
        ),
        (
            config(DemonstrationConfig(strategy="random", num_prefixed=0), loss="sft"),
            "algo.off_policy.loss: got sft, which is not read with algo.demonstrations.num_prefixed=0; "
            "leave it at none, or raise algo.demonstrations.num_prefixed",
        ),
        (
            config(DemonstrationConfig(), loss="luffy"),
            "algo.off_policy.loss: got luffy, which is not read with algo.demonstrations.strategy=none; "
            "leave it at none, or choose another algo.demonstrations.strategy",
        ),
        (
            config(policy_loss="gspo", loss="luffy"),
            "algo.policy_loss.name: got 'gspo' with algo.off_policy.loss=luffy",
        ),
        (config(loss="luffy", reshape="p_div"), "algo.off_policy.reshape: unknown reshape 'p_div'"),
    ],
)
def test_conflicts_are_refused(cfg: AlgoConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_algo_config(cfg, max_response_tokens=8)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (config(loss="luffy", target_probs=True), "reshape=p_div_p_0.5 acts only on demonstration tokens without"),
        (config(loss="luffy", on_policy_reshape="logp"), "on_policy_reshape=logp is about 0 where a ratio is about 1"),
    ],
)
def test_settings_that_hardly_act_are_warned_of(cfg: AlgoConfig, message: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(message)):
        check_algo_config(cfg, max_response_tokens=8)


@pytest.mark.parametrize(
    "cfg",
    [
        config(DemonstrationConfig(strategy="linear", shared=True), loss="luffy", prefix_reward=1.0),
        config(loss="luffy", on_policy_reshape="logp", remove_clip=True),
        config(loss="luffy", target_probs=True, reshape="no_reshape"),
        config(
            loss="luffy", reshape="p_logp", reshape_weight=0.5, on_policy_reshape="pow", on_policy_reshape_exponent=2.0
        ),
        config(DemonstrationConfig(strategy="fixed", num_prefixed=1, max_group_accuracy=0.5), loss="luffy"),
    ],
)
def test_settings_that_agree_pass(cfg: AlgoConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_algo_config(cfg, max_response_tokens=8)
