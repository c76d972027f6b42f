import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.algos import ComposedAlgorithm, build_algorithm
from megarl.algos.build import algorithm_of
from megarl.config import from_dict, load_config
from megarl.config.algo import (
    AdvantageConfig,
    AlgoConfig,
    CpoConfig,
    DemonstrationConfig,
    FilterConfig,
    KLConfig,
    OffPolicyConfig,
    PolicyLossConfig,
)
from megarl.config.schema import Config, RolloutConfig
from megarl.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs" / "algo"


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (
            AlgoConfig(advantage=AdvantageConfig(estimator="gae0")),
            r"algo\.advantage\.estimator.*one of: .*grpo",
        ),
        (AlgoConfig(policy_loss=PolicyLossConfig(name="ppo_clp")), r"policy_loss\.name.*mean 'ppo_clip'"),
        (AlgoConfig(aggregation="token_mean"), r"algo\.aggregation.*did you mean 'token-mean'"),
        (AlgoConfig(kl=KLConfig(estimator="k4")), r"algo\.kl\.estimator.*one of: abs, k1, k2, k3"),
        (AlgoConfig(kl=KLConfig(loss_estimator="k4")), r"algo\.kl\.loss_estimator.*one of: abs, k1, k2, k3"),
        (
            AlgoConfig(kl=KLConfig(where="loss", loss_coef=0.5)),
            r"algo\.kl\.loss_coef: got 0\.5, which is not read with algo\.kl\.where=loss; .*algo\.kl\.where=both",
        ),
        (
            AlgoConfig(kl=KLConfig(where="both"), advantage=AdvantageConfig(estimator="maxrl")),
            r"'maxrl' with algo\.kl\.where=both",
        ),
        (AlgoConfig(kl=KLConfig(controller="adaptve")), r"algo\.kl\.controller.*did you mean 'adaptive'"),  # type: ignore[arg-type]
        (
            AlgoConfig(kl=KLConfig(where="reward", controller="adaptive", coef=0.0)),
            r"algo\.kl\.coef: got 0 with algo\.kl\.controller=adaptive",
        ),
    ],
)
def test_unknown_names_and_conflicts(cfg: AlgoConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(cfg, max_response_tokens=8)


@pytest.mark.parametrize(
    ("estimator", "reason"),
    [("k1", "zero expectation"), ("kl", "zero expectation"), ("abs", "not that of a KL")],
)
def test_estimators_that_do_not_regularise_are_refused_in_the_loss(estimator: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{reason}.*k3_straight_through"):
        build_algorithm(AlgoConfig(kl=KLConfig(where="loss", estimator=estimator)), max_response_tokens=8)
    build_algorithm(AlgoConfig(kl=KLConfig(where="reward", estimator=estimator)), max_response_tokens=8)
    with pytest.raises(ConfigError, match=rf"^algo\.kl\.loss_estimator: got '{estimator}' .*where=both: .*{reason}"):
        build_algorithm(AlgoConfig(kl=KLConfig(where="both", loss_estimator=estimator)), max_response_tokens=8)
    build_algorithm(AlgoConfig(kl=KLConfig(where="both", estimator=estimator)), max_response_tokens=8)


@pytest.mark.parametrize("estimator", ["k2", "mse", "k3", "low_var_kl", "k3_straight_through"])
def test_estimators_that_are_accepted_in_the_loss(estimator: str) -> None:
    build_algorithm(AlgoConfig(kl=KLConfig(where="loss", estimator=estimator)), max_response_tokens=8)


@pytest.mark.parametrize(("configured", "expected"), [(None, 64), (16, 16)])
def test_horizon_defaults_to_the_longest_response(configured: int | None, expected: int) -> None:
    cfg = AlgoConfig(aggregation="seq-mean-token-sum-norm", aggregation_horizon_tokens=configured)
    algorithm = build_algorithm(cfg, max_response_tokens=64)
    assert algorithm.denominators([])["loss"] == expected


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_build(path: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run" / "test.yaml"
    run_file.parent.mkdir()
    run_file.write_text(f"use: {{algo: {path}}}\n", encoding="utf-8")
    cfg = load_config(run_file).algo
    assert cfg.name == path.stem
    build_algorithm(cfg, max_response_tokens=8)


def test_there_is_a_configuration_for_grpo() -> None:
    assert (CONFIGS / "grpo.yaml").is_file()


def test_survives_pickling() -> None:
    algorithm = build_algorithm(AlgoConfig(), max_response_tokens=8)
    assert isinstance(algorithm, ComposedAlgorithm)
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm


def test_gmpo_needs_the_aggregation_of_rows_and_has_no_ratio_per_token() -> None:
    loss = PolicyLossConfig(name="gmpo", clip_low=0.4, clip_high=0.4)
    with pytest.raises(ConfigError, match=r"algo\.aggregation: got 'token-mean' with algo\.policy_loss\.name=gmpo"):
        build_algorithm(AlgoConfig(policy_loss=loss), max_response_tokens=8)
    # No warning: 0.4 bounds single tokens.
    algorithm = build_algorithm(AlgoConfig(policy_loss=loss, aggregation="seq-mean-token-mean"), max_response_tokens=8)
    assert not algorithm.token_local


def test_gspo_needs_its_aggregation() -> None:
    loss = PolicyLossConfig(name="gspo", clip_low=3e-4, clip_high=4e-4)
    with pytest.raises(ConfigError, match=r"algo\.aggregation: got 'token-mean' .*; set algo\.aggregation=seq-mean"):
        build_algorithm(AlgoConfig(policy_loss=loss), max_response_tokens=8)
    build_algorithm(AlgoConfig(policy_loss=loss, aggregation="seq-mean-token-mean"), max_response_tokens=8)
    wide = AlgoConfig(policy_loss=PolicyLossConfig(name="gspo"), aggregation="seq-mean-token-mean")
    with pytest.warns(UserWarning, match=r"clip_high=0\.2 hardly ever clips under gspo"):
        build_algorithm(wide, max_response_tokens=8)


# --- what must fit how the run samples


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_max"])
def test_estimators_that_compare_need_a_group(estimator: str) -> None:
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator))
    message = (
        rf"^rollout.num_samples: got 1, expected >= 2: the {estimator} estimator compares the samples of one prompt; "
        r"raise it or choose another algo.advantage.estimator$"
    )
    with pytest.raises(ConfigError, match=message):
        algorithm_of(Config(algo=algo, rollout=RolloutConfig(num_samples=1)))
    algorithm_of(Config(algo=algo, rollout=RolloutConfig(num_samples=2)))


def test_sets_of_k_rows_must_be_smaller_than_the_group() -> None:
    algo = AlgoConfig(advantage=AdvantageConfig(estimator="passk", k=4))
    with pytest.raises(ConfigError, match=r"^rollout.num_samples: got 4, expected >= 5: the passk estimator compares"):
        algorithm_of(Config(algo=algo, rollout=RolloutConfig(num_samples=4)))
    algorithm_of(Config(algo=algo, rollout=RolloutConfig(num_samples=5)))


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax"])
def test_baseline_estimators_take_single_samples(estimator: str) -> None:
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator))
    algorithm_of(Config(algo=algo, rollout=RolloutConfig(num_samples=1)))


@pytest.mark.parametrize("rollout", [RolloutConfig(record=True), RolloutConfig(source="replay", replay_dir="records")])
def test_refills_and_records_exclude_each_other(rollout: RolloutConfig) -> None:
    algo = AlgoConfig(filter=FilterConfig(mean_score=(0.0, 1.0), max_refills=2))
    with pytest.raises(ConfigError, match="a record holds one batch of prompts per step"):
        algorithm_of(Config(algo=algo, rollout=rollout))
    algorithm_of(Config(algo=replace(algo, filter=FilterConfig(mean_score=(0.0, 1.0))), rollout=rollout))


@pytest.mark.parametrize("rollout", [RolloutConfig(record=True), RolloutConfig(source="replay", replay_dir="records")])
def test_records_do_not_mark_greedy_samples(rollout: RolloutConfig) -> None:
    algo = AlgoConfig(advantage=AdvantageConfig(estimator="remax"))
    with pytest.raises(ConfigError, match="a record does not say which sample of a prompt is the greedy one"):
        algorithm_of(Config(algo=algo, rollout=rollout))


def test_demonstrations_that_may_go_leave_enough_to_compare() -> None:
    algo = AlgoConfig(
        demonstrations=DemonstrationConfig(strategy="random", num_prefixed=1, max_group_accuracy=0.5),
        off_policy=OffPolicyConfig(loss="luffy"),
    )
    with pytest.raises(ConfigError, match=r"num_prefixed: got 1 of rollout\.num_samples=2, expected to leave >= 2"):
        algorithm_of(Config(algo=algo, rollout=RolloutConfig(num_samples=2)))
    algorithm_of(Config(algo=algo, rollout=RolloutConfig(num_samples=3)))


def test_truncated_rows_are_dropped_before_the_loss() -> None:
    cpo = CpoConfig(method="mi3", formula_set="ref", entropy_source="current")
    algo = AlgoConfig(cpo=cpo, off_policy=OffPolicyConfig(drop_truncated=True))
    with pytest.raises(ConfigError, match=r"drop_truncated: got true with algo\.cpo\.entropy_source=current"):
        algorithm_of(Config(algo=algo))
    algorithm_of(Config(algo=replace(algo, cpo=replace(cpo, entropy_source="old"))))


def test_the_adaptive_coefficient_cannot_turn_negative() -> None:
    # 128 prompts of 8 samples: 0.2 × 1024.
    algo = AlgoConfig(kl=KLConfig(where="loss", controller="adaptive", horizon=204.8))
    with pytest.raises(ConfigError, match=r"algo\.kl\.horizon: got 204\.8, expected > 204\.8, 0\.2 × the 1024 rows"):
        algorithm_of(Config(algo=algo))
    algorithm_of(Config(algo=replace(algo, kl=replace(algo.kl, horizon=204.9))))


@pytest.mark.parametrize(
    ("name", "critic", "key"),
    [
        ("grpo", {"freeze": True}, "critic.freeze: got True"),
        ("cpo", {"optimizer": {"lr": 1e-3}}, "critic.optimizer.lr: got 0.001"),
        ("reinforce_max", {"layout": {"tp": 2}}, "critic.layout: got LayoutConfig"),
        ("dapo", {"value_clip": None}, "critic.value_clip: got None"),
    ],
)
def test_settings_of_a_critic_need_one(name: str, critic: dict[str, Any], key: str) -> None:
    algo = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["algo"]
    with pytest.raises(ConfigError) as caught:
        algorithm_of(from_dict(Config, {"algo": algo, "critic": critic}))
    estimator = algo.get("advantage", {}).get("estimator", "grpo")
    assert str(caught.value).startswith(key)
    assert f"which nothing reads: {name} (algo.advantage.estimator={estimator}) has no critic" in str(caught.value)
    ppo = yaml.safe_load((CONFIGS / "ppo.yaml").read_text())
    algorithm_of(from_dict(Config, {"algo": ppo["algo"], "critic": critic}))
