"""The composed algorithm outside its loss: what it requires, advantages, the KL controller."""

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megarl.algos import build_algorithm
from megarl.config.algo import (
    AdvantageConfig,
    AlgoConfig,
    CorrectionConfig,
    DemonstrationConfig,
    KLConfig,
    PolicyLossConfig,
)
from megarl.errors import DataError
from megarl.types import Algorithm, AlgoState, PolicyOutputs, RowBatch, ScoredBatch, TokenQuantity

MakeScored = Callable[..., ScoredBatch]
REWARD_KL = "actor/reward_kl_penalty"


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def algorithm(**cfg: Any) -> Algorithm:
    return build_algorithm(AlgoConfig(**cfg), max_response_tokens=8)


@pytest.mark.parametrize(
    ("where", "quantities"),
    [
        ("none", set()),
        ("loss", {TokenQuantity.REF_LOGPROBS}),
        ("reward", {TokenQuantity.REF_LOGPROBS, TokenQuantity.OLD_LOGPROBS}),
        ("both", {TokenQuantity.REF_LOGPROBS, TokenQuantity.OLD_LOGPROBS}),
    ],
)
def test_requires(where: Literal["none", "loss", "reward", "both"], quantities: set[TokenQuantity]) -> None:
    algo = algorithm(kl=KLConfig(where=where, coef=0.0 if where == "none" else 0.25))
    assert algo.requires() == quantities
    assert algo.initial_state().kl_coef == (0.0 if where == "none" else 0.25)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"kl": KLConfig(where="loss", coef=0.25)}, False),
        ({"correction": CorrectionConfig(name="rollout_ratio", veto=9.0)}, True),
        ({"demonstrations": DemonstrationConfig(strategy="fixed", num_prefixed=1)}, True),
        ({"kl": KLConfig(where="reward", coef=0.25)}, True),
        ({"policy_loss": PolicyLossConfig(name="clip_cov")}, True),
    ],
)
def test_a_ratio_to_the_engine_needs_no_old_logprobs_of_its_own(settings: dict[str, Any], needed: bool) -> None:
    algo = algorithm(**{"correction": CorrectionConfig(name="rollout_ratio"), **settings})
    assert (TokenQuantity.OLD_LOGPROBS in algo.requires()) is needed


def test_a_ratio_to_the_engine_is_the_same_without_old_logprobs(
    make_scored: MakeScored, make_batch: Callable[..., RowBatch]
) -> None:
    """r = e^{−1}/e^{−1.5} is above the clip at 1.2, and e^{−2}/e^{−1.9} is below 1: the loss is −1.2·1 + e^{−0.1}·1."""
    rollout, current = f64([[-1.5], [-1.9]]), f64([[-1.0], [-2.0]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    algo = algorithm(
        correction=CorrectionConfig(name="rollout_ratio"),
        advantage=AdvantageConfig(norm_by_std=False),
        policy_loss=PolicyLossConfig(clip_high=0.2),
    )
    for known in ({}, {"old_logprobs": f64([[-7.0], [-3.0]])}):
        step = make_scored(["a", "a"], [2.0, 0.0], mask, rollout_logprobs=rollout, **known)
        advantages = algo.advantages(step, AlgoState())
        assert advantages.values.tolist() == [[1.0], [-1.0]]
        rows = make_batch(mask, advantages=advantages.values, **advantages.quantities)
        sums = algo.loss(rows, PolicyOutputs(logprobs=current, entropy=None), AlgoState())
        assert float(sums.objective["loss"]) == pytest.approx(-1.2 + math.exp(-0.1))


def test_entropy_needs_a_gradient_only_with_a_coefficient() -> None:
    assert not algorithm().entropy_needs_grad
    assert algorithm(entropy_coef=0.01).entropy_needs_grad


# --- advantages


def test_advantages_and_their_metrics(make_scored: MakeScored) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, False]])
    batch = make_scored(["a", "a", "a"], [3.0, 0.0, 0.0], mask)
    got = algorithm(advantage=AdvantageConfig(norm_by_std=False)).advantages(batch, AlgoState())
    assert got.values.tolist() == [[2, 2, 0], [-1, 0, 0], [-1, -1, 0]]
    assert got.metrics == {
        # The scorer's rewards, the rewards by their source, and those that the estimator saw.
        "reward_source/rule_based": 1.0,
        "critic/rule_score/mean": 1.0,
        "critic/rule_score/max": 3.0,
        "critic/rule_score/min": 0.0,
        "critic/score/mean": 1.0,
        "critic/score/max": 3.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 1.0,
        "critic/rewards/max": 3.0,
        "critic/rewards/min": 0.0,
        # Over the five loss tokens: (2 + 2 − 1 − 1 − 1) / 5.
        "critic/advantages/mean": 0.2,
        "critic/advantages/max": 2.0,
        "critic/advantages/min": -1.0,
        # (2 · 1.8² + 3 · 1.2²) / 5 = 2.16.
        "critic/advantages/std": pytest.approx(math.sqrt(2.16)),
        # Unbiased, of 3, 0 and 0.
        "critic/group_reward_std": pytest.approx(math.sqrt(3)),
    }


def reward_kl_batch(make_scored: MakeScored) -> ScoredBatch:
    """The rows of the golden case C.kl_in_reward (rewards 1, −1), and one without loss tokens (0.5)."""
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    kl = f64([[0.1, 0.2, 0.3], [0.4, -0.2, 0.0], [0.0, 0.0, 0.0]])
    old = torch.where(mask, f64(-1.0), 0.0)
    return make_scored(["a", "a", "a"], [1.0, -1.0, 0.5], mask, old_logprobs=old, ref_logprobs=old - kl)


def test_kl_in_the_reward(make_scored: MakeScored, golden: Any) -> None:
    expected = golden("C.kl_in_reward")["expected"]
    row_rewards = [sum(row) for row in expected["token_level_rewards"]]
    rewards = [*row_rewards, 0.5]
    algo = algorithm(
        advantage=AdvantageConfig(norm_by_std=False), kl=KLConfig(where="reward", estimator="k1", coef=9.0)
    )
    got = algo.advantages(reward_kl_batch(make_scored), AlgoState(kl_coef=0.5))
    centred = [r - sum(rewards) / 3 for r in rewards]
    assert got.values[0].tolist() == pytest.approx([centred[0]] * 3)
    assert got.values[1].tolist() == pytest.approx([centred[1]] * 2 + [0.0])
    assert got.metrics["actor/reward_kl_penalty"] == pytest.approx(expected["current_kl"])
    assert got.metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert got.metrics["critic/score/mean"] == pytest.approx(0.5 / 3)
    assert got.metrics["critic/rewards/mean"] == pytest.approx(sum(rewards) / 3)


def test_reward_kl_coefficient_0_equals_no_kl(make_scored: MakeScored) -> None:
    batch = reward_kl_batch(make_scored)
    zero = algorithm(kl=KLConfig(where="reward", coef=0.0))
    got = zero.advantages(batch, zero.initial_state()).values
    assert torch.equal(got, algorithm().advantages(batch, AlgoState()).values)


def test_kl_in_the_loss_reports_its_coefficient(make_scored: MakeScored) -> None:
    algo = algorithm(kl=KLConfig(where="loss"))
    metrics = algo.advantages(make_scored(["a", "a"], [1.0, 0.0]), AlgoState(kl_coef=0.3)).metrics
    assert metrics["actor/kl_coef"] == 0.3


def test_two_kl_penalties_have_two_coefficients(make_scored: MakeScored) -> None:
    both = algorithm(kl=KLConfig(where="both", estimator="k1", coef=9.0, loss_estimator="k2", loss_coef=0.125))
    reward = algorithm(kl=KLConfig(where="reward", estimator="k1"))
    batch = reward_kl_batch(make_scored)
    got, expected = (algo.advantages(batch, AlgoState(kl_coef=0.5)) for algo in (both, reward))
    assert torch.equal(got.values, expected.values)
    assert got.metrics == {**expected.metrics, "actor/kl_coef": 0.125}
    assert got.metrics["actor/reward_kl_penalty_coeff"] == 0.5


def test_advantages_of_nothing(make_scored: MakeScored) -> None:
    batch = make_scored([], [], torch.zeros(0, 0, dtype=torch.bool))
    got = algorithm().advantages(batch, AlgoState())
    assert got.values.shape == (0, 0)
    assert got.metrics == {"reward_source/rule_based": 1.0}


def test_non_finite_kl_in_the_reward_is_refused(make_scored: MakeScored) -> None:
    batch = reward_kl_batch(make_scored)
    batch.quantities["old_logprobs"][1, 0] = math.nan
    with pytest.raises(DataError, match=r"row 1 \(uid 'a'\)"):
        algorithm(kl=KLConfig(where="reward")).advantages(batch, AlgoState(kl_coef=0.5))


# --- after the step


def test_without_kl_the_state_stays() -> None:
    state = AlgoState(kl_coef=0.0)
    assert algorithm().after_step(state, {}, 256) == state


@pytest.mark.parametrize(("where", "metric"), [("loss", "actor/ref_kl"), ("reward", REWARD_KL), ("both", REWARD_KL)])
def test_adaptive_coefficient_follows_the_kl_metric(where: Literal["loss", "reward", "both"], metric: str) -> None:
    algo = algorithm(kl=KLConfig(where=where, controller="adaptive", coef=0.2, target_nats=6.0))
    # KL 6.3 is 5 % above the target: 0.2·(1 + 0.05·256/10000).
    state = algo.after_step(algo.initial_state(), {metric: 6.3, "other": 1e9}, 256)
    assert state.kl_coef == pytest.approx(0.2 * (1 + 0.05 * 0.0256))
    if where == "loss":
        # Only the critic learned, so that no loss had a KL.
        assert algo.after_step(state, {}, 256) == state
    else:
        # A KL in the rewards is known in every step, critic warm-up included.
        with pytest.raises(KeyError, match=metric):
            algo.after_step(state, {}, 256)


def test_fixed_coefficient_stays() -> None:
    algo = algorithm(kl=KLConfig(where="loss", coef=0.2))
    assert algo.after_step(AlgoState(kl_coef=0.2), {"actor/ref_kl": 50.0}, 256) == AlgoState(kl_coef=0.2)
