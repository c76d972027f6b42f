"""Settings of demonstrations that do not agree are refused before a run."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.algos.validate import check_algo_config
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
            "algo.off_policy.reshape: got p_div_p_0.1, which is not read with loss=sft; leave it at p_div_p_0.5, or "
            "set loss=luffy",
        ),
        (
            config(drop_above=0.9),
            "algo.off_policy.drop_above: got 0.9, which is not read with loss=none; leave it at null",
        ),
        (
            config(loss="luffy", reshape_weight=0.5),
            "algo.off_policy.reshape_weight: got 0.5, which is not read with reshape=p_div_p_0.5; leave it at 0.1, or "
            "set reshape=logp or p_logp",
        ),
        (
            config(loss="luffy", reshape="p_logp", reshape_exponent=2.0),
            "algo.off_policy.reshape_exponent: got 2.0, which is not read with reshape=p_logp; leave it at 0.5, or "
            "set reshape=pow",
        ),
        (
            config(loss="luffy", on_policy_reshape="logp", remove_clip=True, on_policy_reshape_weight=0.5),
            "algo.off_policy.on_policy_reshape_weight: got 0.5, which is not read with on_policy_reshape=logp",
        ),
        (
            config(loss="luffy", reshape="pow", on_policy_reshape_exponent=2.0),
            "algo.off_policy.on_policy_reshape_exponent: got 2.0, which is not read with on_policy_reshape=no_reshape",
        ),
        (config(loss="sft", reshape_weight=0.5), "reshape_weight: got 0.5, which is not read with loss=sft"),
        (
            config(DemonstrationConfig(min_ratio=0.1)),
            "algo.demonstrations.min_ratio: got 0.1, which is not read with algo.demonstrations.strategy=none; "
            "leave it at 0.0, or choose another algo.demonstrations.strategy",
        ),
        (config(DemonstrationConfig(num_prefixed=1)), "algo.demonstrations.num_prefixed: got 1, which is not read"),
        (config(DemonstrationConfig(keep_frac=0.5)), "algo.demonstrations.keep_frac: got 0.5, which is not read"),
        (
            config(DemonstrationConfig(strategy="linear_max", min_ratio=0.1)),
            "algo.demonstrations.min_ratio: got 0.1, which is not read with strategy=linear_max; leave it at 0.0, or "
            "set strategy=random or fixed",
        ),
        (
            config(DemonstrationConfig(strategy="random", variance=0.2)),
            "algo.demonstrations.variance: got 0.2, which is not read with strategy=random",
        ),
        (
            config(DemonstrationConfig(strategy="fixed", decay_steps=9)),
            "algo.demonstrations.decay_steps: got 9, which is not read with strategy=fixed",
        ),
        (
            config(DemonstrationConfig(strategy="random", num_prefixed=0), loss="sft"),
            "algo.off_policy.loss: got sft, which is not read with algo.demonstrations.num_prefixed=0; "
            "leave it at none, or raise algo.demonstrations.num_prefixed",
        ),
        (
            config(loss="luffy", sft_coef=0.5),
            "algo.off_policy.sft_coef: got 0.5, which is not read with loss=luffy; leave it at 0.1, or set loss=sft",
        ),
        (
            config(DemonstrationConfig(), loss="luffy"),
            "algo.off_policy.loss: got luffy, which is not read with algo.demonstrations.strategy=none; "
            "leave it at none, or choose another algo.demonstrations.strategy",
        ),
        (
            config(DemonstrationConfig(), prefix_reward=1.0),
            "algo.off_policy.prefix_reward: got 1.0, which is not read with algo.demonstrations.strategy=none",
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
        AlgoConfig(),
        config(loss="luffy"),
        config(loss="sft", policy_loss="reinforce"),
        config(DemonstrationConfig(strategy="linear", shared=True), loss="luffy", prefix_reward=1.0),
        config(loss="luffy", on_policy_reshape="logp", remove_clip=True),
        config(loss="luffy", target_probs=True, reshape="no_reshape"),
        config(
            loss="luffy", reshape="p_logp", reshape_weight=0.5, on_policy_reshape="pow", on_policy_reshape_exponent=2.0
        ),
        config(DemonstrationConfig(strategy="linear_variance", variance=0.2, decay_steps=9)),
        config(DemonstrationConfig(strategy="random", num_prefixed=0, min_ratio=0.1), policy_weight=2.0),
        config(DemonstrationConfig(strategy="fixed", num_prefixed=1, max_group_accuracy=0.5), loss="luffy"),
    ],
)
def test_settings_that_agree_pass(cfg: AlgoConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_algo_config(cfg, max_response_tokens=8)


@pytest.mark.parametrize("name", ["luffy", "luffy_prefix", "luffy_sft"])
def test_the_files_of_configs_pass(name: str) -> None:
    body = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    cfg = from_dict(AlgoConfig, body["algo"], "algo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_algo_config(cfg, max_response_tokens=8)
