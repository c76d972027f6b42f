"""Score centering and DPPO over recorded heads: by hand, by enumeration of a vocabulary of 8, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos import build_algorithm
from megarl.algos.build import algorithm_of
from megarl.algos.centering import bounded_error, with_head
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.config.algo import (
    AlgoConfig,
    CorrectionConfig,
    DemonstrationConfig,
    DistillConfig,
    PolicyLossConfig,
)
from megarl.config.engine import EngineConfig
from megarl.config.generation import RolloutConfig, ScheduleConfig
from megarl.config.schema import Config, SyncConfig, TrainerConfig
from megarl.errors import ConfigError, DataError, RunError
from megarl.types import LikelyTokens
from tests.helpers.examples import row, step, tensor


def config(weight: str, low: float | None = None, high: float | None = None) -> PolicyLossConfig:
    given: Any = weight
    return PolicyLossConfig(name="score_centering", center_weight=given, center_low=low, center_high=high)


def test_dppo_masks_by_the_head() -> None:
    x = PolicyLossInputs(
        logprobs=tensor([[0.4, 0.4, 0.1, 0.1]]).log(),
        old_logprobs=tensor([[0.2, 0.2, 0.2, 0.2]]).log(),
        advantages=tensor([[1.0, -1.0, -1.0, 1.0]]),
        loss_mask=torch.ones(1, 4, dtype=torch.bool),
        beside=tensor([[0.3, 0.3, 0.3, 0.3]]),
    )
    for name in ("dppo_top_tv", "dppo_top_kl"):
        cfg = PolicyLossConfig(name=name, clip_high=0.25, clip_low=0.25)
        assert policy_loss(x, cfg).loss[0].tolist() == pytest.approx([0.0, 2.0, 0.0, -0.5])


def test_the_limit_of_the_error_names_the_row() -> None:
    batch = step("aab", [1.0, 0.0, 1.0], engine_tail=[[0.0, 0.5], [0.25, 0.25], [0.0, 0.0]])
    advantages = tensor([[1.0, 1.0], [-2.0, -2.0], [9.0, 9.0]])
    found = bounded_error(advantages, batch, replace(config("tis"), max_head_error=4.0))
    # Rows: 4·1·0.25·2, 4·2·0.25·2, 0.
    assert found.metrics["actor/sc_error_bound"] == pytest.approx(2.0)
    assert found.metrics["actor/sc_error_bound_max"] == pytest.approx(4.0)
    with pytest.raises(RunError, match=r"row 1, of prompt a, by 4 per token.*raise rollout.head_tokens"):
        bounded_error(advantages, batch, replace(config("tis"), max_head_error=3.9))


def test_rows_without_heads_are_refused() -> None:
    likely = LikelyTokens(ids=np.array([[3, -1], [-1, -1]], np.int32), logprobs=np.full((2, 2), -1, np.float32))
    with pytest.raises(DataError, match=r"row a/0: .* response token 1; sample with rollout.head_tokens"):
        with_head(replace(row([1, 1]), likely=likely), keeps_sampled=True)
    assert with_head(replace(row([1, 0]), likely=likely), keeps_sampled=True).likely is likely
    with pytest.raises(DataError, match="response token 1"):
        with_head(row([0, 1]), keeps_sampled=False)


CENTERED = PolicyLossConfig(name="score_centering")
KEPT = PolicyLossConfig(name="dppo_top_tv", compared_with="trainer")
REFUSED = [
    (AlgoConfig(policy_loss=CENTERED, correction=CorrectionConfig(name="tis_upper")), "both would weigh them twice"),
    (AlgoConfig(policy_loss=PolicyLossConfig(name="dppo_top_tv")), "set algo.correction.name=rollout_ratio"),
    (AlgoConfig(policy_loss=CENTERED, demonstrations=DemonstrationConfig(strategy="random")), "no engine has"),
    (AlgoConfig(policy_loss=CENTERED, distill=DistillConfig(teacher="model", mode="exact")), "one distribution"),
    (AlgoConfig(policy_loss=CENTERED, echo_coef=0.1), "echo_coef: got 0.1 with algo.policy_loss.name=score_centering"),
    (AlgoConfig(echo_coef=0.1, distill=DistillConfig(teacher="model", mode="exact")), "with algo.distill.mode=exact"),
    (AlgoConfig(policy_loss=config("none", high=2.0)), "set .*center_weight=tis or mis"),
    (AlgoConfig(policy_loss=config("tis", low=1.5)), "center_low <= 1 <= center_high"),
    (AlgoConfig(policy_loss=PolicyLossConfig(center_weight="tis")), "score_centering"),
    (
        AlgoConfig(policy_loss=PolicyLossConfig(compared_with="trainer")),
        "compared_with: got trainer, which is not read",
    ),
    (AlgoConfig(policy_loss=KEPT, correction=CorrectionConfig(name="rollout_ratio")), "whose ratio is to the policy"),
    (
        AlgoConfig(policy_loss=replace(KEPT, kept_versions=1), correction=CorrectionConfig(name="tis_upper")),
        "so that staleness would be weighed twice; set algo.correction.name=none",
    ),
]


@pytest.mark.parametrize(("cfg", "message"), REFUSED)
def test_refusals(cfg: AlgoConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(cfg, max_response_tokens=8)


# What sampled is not what ranks keep.
OTHER_SAMPLERS: list[tuple[str, dict[str, Any]]] = [
    (
        "algo.policy_loss.kept_versions: got 0 with compared_with=trainer and .*staleness=1, .* may be 1 updates old",
        {"rollout": RolloutConfig(schedule=ScheduleConfig(staleness=1))},
    ),
    ("rollout.top_p: got 0.9", {"rollout": RolloutConfig(top_p=0.9, top_k=50)}),
    ("rollout.top_k: got 50", {"rollout": RolloutConfig(top_k=50)}),
    ("rollout.source: got replay", {"rollout": RolloutConfig(source="replay", replay_dir="records")}),
    ("sync.dtype: got float8_e4m3", {"sync": SyncConfig(dtype="float8_e4m3")}),
    ("rollout.engine.dtype: got bfloat16", {"rollout": RolloutConfig(engine=EngineConfig(dtype="bfloat16"))}),
    ("rollout.engine.quantization: got", {"rollout": RolloutConfig(engine=EngineConfig(quantization="fp8_per_block"))}),
    ("rollout.engine.kv_cache_dtype: got", {"rollout": RolloutConfig(engine=EngineConfig(kv_cache_dtype="fp8_e4m3"))}),
    ("rollout.head_tokens: got 8", {"rollout": RolloutConfig(head_tokens=8)}),
]


@pytest.mark.parametrize(("message", "given"), OTHER_SAMPLERS)
def test_a_policy_that_did_not_sample_is_refused(message: str, given: dict[str, Any]) -> None:
    algo = AlgoConfig(policy_loss=KEPT)
    with pytest.raises(ConfigError, match=f"^{message}.*; set it to "):
        algorithm_of(Config(algo=algo, **given))


def test_what_beside_the_policy_itself_is_allowed() -> None:
    """Weights for the engine's mismatch multiply a ratio to the policy: nothing is weighed twice."""
    for loss in (KEPT, replace(CENTERED, compared_with="trainer")):
        algorithm_of(Config(algo=AlgoConfig(policy_loss=loss)))
        algorithm_of(Config(algo=AlgoConfig(policy_loss=loss, correction=CorrectionConfig(name="tis_upper"))))


def test_as_many_versions_are_kept_as_tokens_may_be_old() -> None:
    """Of a window of ½·(2 + 1)·32 = 48 prompts, ⌈47/32⌉ = 2 more than staleness 2."""
    window = ScheduleConfig(staleness=2, window_frac=0.5)
    for schedule, count in ((ScheduleConfig(staleness=2), 2), (window, 4), (ScheduleConfig(), 0)):
        rollout, trainer = RolloutConfig(schedule=schedule), TrainerConfig(prompts_per_step=32)
        algorithm_of(
            Config(algo=AlgoConfig(policy_loss=replace(KEPT, kept_versions=count)), rollout=rollout, trainer=trainer)
        )
        too_many = AlgoConfig(policy_loss=replace(KEPT, kept_versions=count + 1))
        with pytest.raises(ConfigError, match=f"kept_versions: got {count + 1}.*; set it to {count}"):
            algorithm_of(Config(algo=too_many, rollout=rollout, trainer=trainer))
