"""From rewards to advantages: shaping, source, mask and flip."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.advantages import Estimate
from megarl.algos.rewards import (
    critic_rewards,
    hide_rewards,
    keep_rows,
    overlong_penalty,
    reward_advantages,
    shape_rewards,
)
from megarl.algos.token_rewards import place_reward
from megarl.config.algo import AdvantageConfig, RewardConfig, RewardMaskConfig
from megarl.types import ScoredBatch

MakeScored = Callable[..., ScoredBatch]

GAE_CASES = ["B.rule.gae_lam1.0", "B.rule.gae_lam0.95"]
MASK_CASES = ["B.rule.mask.flip_after_whiten", "B.rule.mask.flip_before_whiten", "B.rule.mask.noflip"]


def scored(case: Any, make_scored: MakeScored) -> ScoredBatch:
    inputs = case["inputs"]
    rewards = torch.tensor(inputs["token_level_scores"], dtype=torch.float64).sum(dim=-1).tolist()
    values = torch.tensor(inputs["values"], dtype=torch.float64)
    mask = torch.tensor(inputs["response_mask"]).bool()
    # What stands outside the mask is not read.
    return make_scored(["q0", "q1", "q2"], rewards, mask, values=values.masked_fill(~mask, math.nan))


def keep_of(case: Any) -> Tensor:
    return torch.tensor(case["inputs"]["keep_mask"]).bool()


def check_estimate(got: Estimate, case: Any, check_golden: Any) -> None:
    assert got.returns is not None
    check_golden(got.advantages, case["expected"]["advantages"], case)
    if "returns" in case["expected"]:
        check_golden(got.returns, case["expected"]["returns"], case)


@pytest.mark.parametrize("case_id", GAE_CASES)
def test_rule_rewards_golden(case_id: str, golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden(case_id)
    batch = scored(case, make_scored)
    cfg = AdvantageConfig(estimator="gae", gamma=case["params"]["gamma"], lam=case["params"]["lam"])
    got = reward_advantages(batch, RewardConfig(), cfg)
    check_estimate(got, case, check_golden)
    assert got.metrics["reward_source/rule_based"] == 1
    assert not any(name.startswith("reward_mask/") for name in got.metrics)
    raw = reward_advantages(batch, RewardConfig(), replace(cfg, whiten=False))
    check_golden(raw.advantages, case["expected"]["raw_adv"], case)
    assert raw.returns is not None
    check_golden(raw.returns, case["expected"]["returns"], case)


@pytest.mark.parametrize("case_id", MASK_CASES)
def test_masked_rewards_golden(case_id: str, golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden(case_id)
    params = case["params"]
    stage = params.get("flip_stage", "after_whiten")
    reward = RewardConfig(mask=RewardMaskConfig(ratio=0.5, flip=params["flip"], flip_stage=stage))
    cfg = AdvantageConfig(estimator="gae", gamma=params["gamma"], lam=params["lam"])
    got = reward_advantages(scored(case, make_scored), reward, cfg, keep=keep_of(case))
    check_estimate(got, case, check_golden)
    assert got.metrics["reward_mask/num_masked"] == 2
    assert got.metrics["reward_mask/mask_ratio_actual"] == pytest.approx(2 / 3)
    assert ("reward_mask/flip_adv" in got.metrics) == params["flip"]


@pytest.mark.parametrize("estimator", ["critic_value", "gae"])
def test_critic_rewards_golden(estimator: str, golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden("B.critic")
    expected = case["expected"]
    # A KL penalty has no part in it.
    batch = scored(case, make_scored)
    batch = replace(
        batch, quantities={**batch.quantities, "kl_penalty": torch.full_like(batch.quantities["values"], 0.5)}
    )
    reward = RewardConfig(source="critic", mask=RewardMaskConfig(ratio=0.5))
    got = reward_advantages(batch, reward, AdvantageConfig(estimator=estimator), keep=keep_of(case))
    check_estimate(got, case, check_golden)
    raw = reward_advantages(batch, reward, AdvantageConfig(estimator=estimator, whiten=False), keep=keep_of(case))
    check_golden(raw.advantages, expected["raw_adv"], case)

    sourced = critic_rewards(batch)
    check_golden(place_reward(sourced.rewards, batch.loss_mask), expected["token_level_rewards_before_mask"], case)
    hidden = hide_rewards(sourced, keep_of(case))
    check_golden(place_reward(hidden.rewards, batch.loss_mask), expected["token_level_rewards_after_mask"], case)

    assert got.metrics["reward_source/critic"] == 1
    assert got.metrics["reward_mask/num_masked"] == 2
    assert "reward_mask/flip_adv" not in got.metrics
    assert got.metrics["critic/score/max"] == pytest.approx(0.9)
    assert got.metrics["critic/rewards/mean"] == pytest.approx(0.3)


def test_returns_are_not_those_of_the_whitened_advantages(
    golden: Any, check_golden: Any, make_scored: MakeScored
) -> None:
    """The literal reading of the source (returns = whitened A + V) would train the critic on a rescaled target."""
    case = golden("B.critic.returns_literal")
    batch = scored(case, make_scored)
    got = reward_advantages(batch, RewardConfig(source="critic"), AdvantageConfig(estimator="critic_value"))
    assert got.returns is not None
    values = batch.quantities["values"].masked_fill(~batch.loss_mask, 0.0)
    check_golden(got.advantages + values, case["expected"]["returns"], case)
    assert (got.returns - torch.tensor(case["expected"]["returns"], dtype=torch.float64)).abs().max() > 0.5


def test_the_mask_hides_the_kl_penalty_too(make_scored: MakeScored) -> None:
    penalty = torch.full((2, 2), 0.25, dtype=torch.float64)
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    batch = make_scored(["a", "b"], [1.0, 1.0], kl_penalty=penalty, values=zeros)
    cfg = AdvantageConfig(estimator="gae", whiten=False)
    got = reward_advantages(batch, RewardConfig(), cfg, keep=torch.tensor([True, False]))
    assert got.advantages.tolist() == [[0.5, 0.75], [0.0, 0.0]]
    assert got.metrics["critic/score/mean"] == 1.0
    assert got.metrics["critic/rewards/mean"] == 0.25
    assert batch.quantities["kl_penalty"].tolist() == penalty.tolist()


def test_hidden_rows_of_a_group_count_as_failures(make_scored: MakeScored) -> None:
    # Rewards 1, 0 (hidden), 0: mean 1/3; the hidden row's advantage changes sign.
    batch = make_scored(["a", "a", "a"], [1.0, 1.0, 0.0])
    cfg = AdvantageConfig(estimator="dr_grpo")
    got = reward_advantages(batch, RewardConfig(), cfg, keep=torch.tensor([True, False, True]))
    assert got.advantages[:, 0].tolist() == pytest.approx([2 / 3, 1 / 3, -1 / 3])


def test_the_mask_is_drawn_from_the_seed_of_the_batch(make_scored: MakeScored) -> None:
    uids = [f"q{i}" for i in range(40)]
    batch = replace(make_scored(uids, [1.0] * 40), seed=7)
    mask = RewardMaskConfig(ratio=0.5)
    got = reward_advantages(batch, RewardConfig(mask=mask), AdvantageConfig(estimator="dr_grpo"))
    expected = reward_advantages(
        batch, RewardConfig(mask=mask), AdvantageConfig(estimator="dr_grpo"), keep=keep_rows(uids, mask, seed=7)
    )
    assert torch.equal(got.advantages, expected.advantages)
    assert 5 < got.metrics["reward_mask/num_masked"] < 35


def test_fixed_count_golden(golden: Any) -> None:
    case = golden("B.fixed_ratio_count")
    for n, ratio, expected in zip(case["inputs"]["batch"], case["inputs"]["ratio"], case["expected"], strict=True):
        keep = keep_rows([f"q{i}" for i in range(n)], RewardMaskConfig(ratio=ratio, kind="fixed"), seed=3)
        assert int((~keep).sum()) == expected


def test_fixed_count_is_that_of_the_decimal_ratio() -> None:
    assert 100 * 0.29 < 29
    for num_rows, ratio, expected in ((100, 0.29, 29), (30, 0.1, 3)):
        keep = keep_rows(["q"] * num_rows, RewardMaskConfig(ratio=ratio, kind="fixed"), seed=3)
        assert int((~keep).sum()) == expected


@given(
    uids=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20),
    ratio=st.sampled_from([0.25, 0.5, 1.0]),
    kind=st.sampled_from(["bernoulli", "fixed"]),
    seed=st.integers(0, 99),
)
def test_hidden_rows_do_not_depend_on_the_order_of_groups(
    uids: list[str], ratio: float, kind: Literal["bernoulli", "fixed"], seed: int
) -> None:
    cfg = RewardMaskConfig(ratio=ratio, kind=kind)
    keep = keep_rows(uids, cfg, seed=seed)
    assert torch.equal(keep, keep_rows(uids, cfg, seed=seed))
    # Sorting by uid keeps the order within groups.
    order = sorted(range(len(uids)), key=lambda i: uids[i])
    assert torch.equal(keep_rows([uids[i] for i in order], cfg, seed=seed), keep[order])
    if ratio == 1.0:
        assert not keep.any()


def test_hidden_rows_depend_on_seed_uid_and_place() -> None:
    cfg = RewardMaskConfig(ratio=0.25)
    first, second = (keep_rows(["a"] * 4000, cfg, seed=seed) for seed in (1, 2))
    other_uid = keep_rows(["b"] * 4000, cfg, seed=1)
    # 1000 ± 5 standard deviations of 27 hidden; two independent choices differ in 2·¼·¾ of the rows.
    for keep in (first, second, other_uid):
        assert abs(int((~keep).sum()) - 1000) < 140
    for other in (second, other_uid):
        assert abs(int((first != other).sum()) - 1500) < 160


def test_overlong_golden(golden: Any, check_golden: Any) -> None:
    case = golden("D.overlong")
    params = case["params"]
    got = overlong_penalty(
        torch.tensor(case["inputs"]["length"]),
        max_tokens=params["max_new_tokens"],
        buffer_tokens=params["buffer"],
        factor=params["factor"],
    )
    check_golden(got, case["expected"], case)


def test_shaping_in_order(make_scored: MakeScored) -> None:
    """Penalty of the length, then the limit, then the bounds."""
    mask = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])
    batch = replace(make_scored(["a"] * 3, [2.0, 2.0, 5.0], mask), truncated=torch.tensor([True, False, False]))
    cfg = RewardConfig(overlong_buffer_tokens=2, overlong_factor=0.5, truncated=0.25, clip=(-1.0, 3.0))
    got = shape_rewards(batch, cfg, max_response_tokens=4)
    assert got.rewards.tolist() == [0.375, 1.5, 3.0]
    assert got.metrics == pytest.approx(
        {
            "critic/rule_score/mean": 3.0,
            "critic/rule_score/max": 5.0,
            "critic/rule_score/min": 2.0,
            "reward/overlong_penalty_mean": -1 / 3,
            "reward/truncated_frac": 1 / 3,
            "reward/clipped_frac": 1 / 3,
        }
    )
    assert batch.rewards.tolist() == [2.0, 2.0, 5.0]


@pytest.mark.parametrize(("coef", "expected"), [(0.0, 0.0), (0.5, 1.0), (-0.5, -0.5)])
def test_truncated_responses(make_scored: MakeScored, coef: float, expected: float) -> None:
    batch = replace(make_scored(["a", "a"], [2.0, 2.0]), truncated=torch.tensor([True, False]))
    got = shape_rewards(batch, RewardConfig(truncated=coef), max_response_tokens=9)
    assert got.rewards.tolist() == [expected, 2.0]


def test_nothing_to_shape(make_scored: MakeScored) -> None:
    batch = make_scored(["a", "a"], [2.0, 1.0])
    got = shape_rewards(batch, RewardConfig(truncated=-1.0), max_response_tokens=9)
    assert torch.equal(got.rewards, batch.rewards)
    assert got.rewards.dtype == torch.float64
    float32 = shape_rewards(
        replace(batch, rewards=batch.rewards.float()), RewardConfig(overlong_buffer_tokens=3), max_response_tokens=9
    )
    assert float32.rewards.dtype == torch.float32
    empty = make_scored([], [], torch.zeros(0, 0, dtype=torch.bool))
    assert shape_rewards(empty, RewardConfig(overlong_buffer_tokens=1), max_response_tokens=9).rewards.shape == (0,)


@pytest.mark.parametrize(("demonstrated", "mean"), [([1.0, 0.0, 0.0], 0.25), ([1.0, 1.0, 1.0], 0.5)])
def test_the_score_of_the_policy_leaves_demonstrations_out(
    demonstrated: list[float], mean: float, make_scored: MakeScored
) -> None:
    """Unless there is nothing else: (0.5 + 0) / 2 of the others, (1 + 0.5 + 0) / 3 of all."""
    mask = torch.ones(3, 2, dtype=torch.bool)
    demonstration = torch.tensor([[each, 0.0] for each in demonstrated])
    batch = make_scored(["q"] * 3, [1.0, 0.5, 0.0], mask, demonstration=demonstration)
    shaped = shape_rewards(batch, RewardConfig(), max_response_tokens=8)
    assert shaped.metrics["critic/rule_score/mean"] == mean
    assert shaped.rewards.tolist() == [1.0, 0.5, 0.0]
