"""Settings of the composition that nothing would read are refused before a run."""

import re
from typing import Any

import pytest

from megarl.algos import build_algorithm
from megarl.config import Config, from_dict
from megarl.config.algo import AlgoConfig
from megarl.errors import ConfigError


def algo(**keys: Any) -> AlgoConfig:
    return from_dict(Config, {"algo": keys}).algo


GSPO = {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
ROWS = {"aggregation": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"kl": {"coef": 0.5}},
            "algo.kl.coef: got 0.5, which is not read with algo.kl.where=none; leave it at 0.001, or set "
            "algo.kl.where=loss or reward",
        ),
        ({"kl": {"controller": "adaptive"}}, "algo.kl.controller: got adaptive, which is not read with"),
        ({"kl": {"target_nats": 1.0}}, "algo.kl.target_nats: got 1.0, which is not read with algo.kl.where=none"),
        ({"kl": {"estimator": "k1"}}, "algo.kl.estimator: got k1, which is not read with algo.kl.where=none"),
        (
            {"kl": {"where": "loss", "target_nats": 1.0}},
            "algo.kl.target_nats: got 1.0, which is not read with algo.kl.controller=fixed; leave it at 6.0, or set "
            "algo.kl.controller=adaptive",
        ),
        (
            {"aggregation_horizon_tokens": 9},
            "algo.aggregation_horizon_tokens: got 9, which is not read with algo.aggregation=token-mean; leave it at "
            "null, or set algo.aggregation=dr_grpo",
        ),
        (
            {"policy_loss": {"name": "cispo", "dual_clip": 2.0}},
            "algo.policy_loss.dual_clip: got 2.0, which is not read with algo.policy_loss.name=cispo; leave it at "
            "3.0, or set algo.policy_loss.name=ppo_clip",
        ),
        ({"policy_loss": GSPO | {"dual_clip": 2.0}} | ROWS, "dual_clip: got 2.0, which is not read with"),
        ({"policy_loss": {"name": "reinforce", "clip_low": 0.1}}, "clip_low: got 0.1, which is not read with"),
        ({"policy_loss": {"name": "sapo", "clip_high": 0.3}}, "clip_high: got 0.3, which is not read with"),
        ({"policy_loss": {"name": "gmpo", "dual_clip": 2.0}} | ROWS, "dual_clip: got 2.0, which is not read with"),
        (
            {"policy_loss": {"tau_neg": 2.0}},
            "algo.policy_loss.tau_neg: got 2.0, which is not read with algo.policy_loss.name=ppo_clip; leave it at "
            "1.05, or set algo.policy_loss.name=sapo",
        ),
        (
            {"entropy_coef": 0.1, "entropy": {"target_nats": 0.5}},
            "algo.entropy.target_nats: got 0.5, which is not read with algo.entropy.controller=fixed; leave it at "
            "1.0, or set algo.entropy.controller=learned",
        ),
        ({"entropy": {"lr": 0.5}}, "algo.entropy.lr: got 0.5, which is not read with algo.entropy.controller=fixed"),
        (
            {"entropy_coef": 0.1, "entropy": {"controller": "proportional", "lr": 0.5}},
            "algo.entropy.lr: got 0.5, which is not read with algo.entropy.controller=proportional",
        ),
    ],
)
def test_what_nothing_reads_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_algorithm(algo(**keys), max_response_tokens=8)


@pytest.mark.parametrize(
    "keys",
    [
        {"kl": {"coef": 0.0}},
        {"kl": {"where": "reward", "estimator": "k1", "controller": "adaptive", "target_nats": 1.0, "horizon": 9.0}},
        {"aggregation": "dr_grpo", "aggregation_horizon_tokens": 9},
        {"policy_loss": GSPO | {"dual_clip": None}} | ROWS,
        {"policy_loss": {"name": "cispo", "clip_high": 0.3}},
        {"policy_loss": {"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "dual_clip": None}} | ROWS,
        {"policy_loss": {"name": "sapo", "tau_pos": 0.5, "tau_neg": 2.0}},
        {"policy_loss": {"dual_clip": 2.0}},
        {"entropy_coef": 0.1, "entropy": {"controller": "proportional", "target_nats": 0.5, "max_coef": 0.2}},
        {"entropy_coef": 0.1, "entropy": {"controller": "learned", "target_nats": 0.5, "lr": 0.5}},
    ],
)
def test_what_is_read_passes(keys: dict[str, Any]) -> None:
    build_algorithm(algo(**keys), max_response_tokens=8)
