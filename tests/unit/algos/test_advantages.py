"""Estimators that compare a row with its group, and what all estimators share."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, Flip, compute_advantages
from megarl.config.algo import AdvantageConfig
from megarl.errors import ConfigError, DataError
from megarl.types import ScoredBatch

MakeScored = Callable[..., ScoredBatch]


def rows_of(batch: ScoredBatch, cfg: AdvantageConfig) -> list[float]:
    """Advantages of rows whose first token is a loss token."""
    return compute_advantages(batch, cfg).advantages[:, 0].tolist()


@pytest.mark.parametrize("case_id", ["C.grpo.std_True", "C.grpo.std_False", "C.grpo.single"])
def test_grpo_golden(case_id: str, golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden(case_id)
    mask = torch.ones(len(case["inputs"]["uid"]), 3, dtype=torch.bool)
    mask[0, 2] = False
    batch = make_scored(case["inputs"]["uid"], case["inputs"]["reward"], mask)
    got = compute_advantages(batch, AdvantageConfig(norm_by_std=case["params"]["norm_by_std"]))
    expected = torch.tensor(case["expected"], dtype=torch.float64)[:, None] * mask
    assert got.advantages.dtype == torch.float64
    assert got.returns is None
    check_golden(got.advantages, expected, case)


@pytest.mark.parametrize("case_id", ["E.grpo_split.std_True", "E.grpo_split.std_False"])
def test_grpo_split_golden(case_id: str, golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden(case_id)
    inputs = case["inputs"]
    # One demonstration token makes a row off-policy.
    demonstration = torch.zeros(len(inputs["uid"]), 2, dtype=torch.float64)
    demonstration[:, 0] = ~torch.tensor(inputs["on_policy"])
    batch = make_scored(inputs["uid"], inputs["reward"], demonstration=demonstration)
    cfg = AdvantageConfig(estimator="grpo_split", norm_by_std=case["params"]["grpo_use_std"])
    check_golden(rows_of(batch, cfg), case["expected"], case)


def test_grpo_split_without_on_policy_rows_is_grpo(make_scored: MakeScored) -> None:
    ones = torch.ones(3, 2, dtype=torch.float64)
    batch = make_scored(["a", "a", "a"], [1.0, 0.0, 3.0], demonstration=ones)
    split = compute_advantages(batch, AdvantageConfig(estimator="grpo_split")).advantages
    torch.testing.assert_close(split, compute_advantages(batch, AdvantageConfig()).advantages)


def test_grpo_split_of_a_single_on_policy_row(make_scored: MakeScored) -> None:
    # Mean 0 and deviation 1, for the demonstration of the group too.
    demonstration = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    batch = make_scored(["a", "a"], [1.0, 0.5], demonstration=demonstration)
    got = rows_of(batch, AdvantageConfig(estimator="grpo_split", norm_by_std=False))
    assert got == [1.0, 0.5]


def test_demonstrations_outside_the_loss_mask_do_not_count(make_scored: MakeScored) -> None:
    mask = torch.tensor([[True, False], [True, True]])
    demonstration = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    batch = make_scored(["a", "a"], [1.0, 0.0], mask, demonstration=demonstration)
    assert rows_of(batch, AdvantageConfig(estimator="grpo_split", norm_by_std=False)) == [0.5, -0.5]


def test_rloo_golden(golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden("D.rloo")
    groups = case["inputs"]["rewards"]
    uids = [f"q{i}" for i, group in enumerate(groups) for _ in group]
    batch = make_scored(uids, [r for group in groups for r in group])
    got = torch.tensor(rows_of(batch, AdvantageConfig(estimator="rloo"))).view(len(groups), -1)
    check_golden(got, case["expected"], case)


def test_dr_grpo_is_grpo_without_the_deviation(make_scored: MakeScored) -> None:
    batch = make_scored(["a", "b", "a", "a"], [1.0, 5.0, 0.0, 0.5])
    got = rows_of(batch, AdvantageConfig(estimator="dr_grpo"))
    assert got == [0.5, 5.0, -0.5, 0.0]
    assert got == rows_of(batch, AdvantageConfig(estimator="grpo", norm_by_std=False))


def test_group_norm(make_scored: MakeScored) -> None:
    # Rewards 0, 1, 2: mean 1, unbiased deviation 1. A group of equal rewards: 0 / 1e-9.
    batch = make_scored(["a", "a", "a", "b", "b"], [0.0, 1.0, 2.0, 0.25, 0.25])
    expected = [-1 / (1 + 1e-9), 0.0, 1 / (1 + 1e-9), 0.0, 0.0]
    assert rows_of(batch, AdvantageConfig(estimator="group_norm")) == pytest.approx(expected, rel=1e-14, abs=0)


def test_maxrl(make_scored: MakeScored) -> None:
    # p = 1/4: (1 − p)/p = 3 and −1. p = 1 and p = 0: nothing to learn.
    batch = make_scored(["a"] * 4 + ["b"] * 2 + ["c"] * 2, [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert rows_of(batch, AdvantageConfig(estimator="maxrl")) == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_maxrl_refuses_negative_rewards(make_scored: MakeScored) -> None:
    with pytest.raises(DataError, match=r"row 1 \(uid 'b'\): got -1\.0, expected >= 0 with .*maxrl"):
        compute_advantages(make_scored(["a", "b"], [1.0, -1.0]), AdvantageConfig(estimator="maxrl"))


def test_groups_of_one_have_no_baseline(make_scored: MakeScored) -> None:
    batch = make_scored(["a"], [3.0])
    expected = {"grpo": 3 / (1 + 1e-6), "grpo_split": 3 / (1 + 1e-6), "group_norm": 3 / (1 + 1e-9)}
    expected |= {"dr_grpo": 3.0, "rloo": 3.0, "reinforce_max": 3.0, "maxrl": 0.0}
    for name, value in expected.items():
        assert rows_of(batch, AdvantageConfig(estimator=name)) == [pytest.approx(value)], name


@pytest.mark.parametrize("name", ["grpo", "grpo_split", "dr_grpo", "rloo"])
def test_kl_penalty_lowers_the_rewards_of_rows(name: str, make_scored: MakeScored) -> None:
    # Rows lose 0.25 + 0.25 and 0.5 of their rewards; NaN outside the mask is unread.
    mask = torch.tensor([[True, True], [True, False]])
    penalty = torch.tensor([[0.25, 0.25], [0.5, math.nan]], dtype=torch.float64)
    cfg = AdvantageConfig(estimator=name, norm_by_std=False)
    with_kl = compute_advantages(make_scored(["a", "a"], [1.5, 1.0], mask, kl_penalty=penalty), cfg)
    without = compute_advantages(make_scored(["a", "a"], [1.0, 0.5], mask), cfg)
    assert torch.equal(with_kl.advantages, without.advantages)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_float32_rewards_carry_no_signal(norm_by_std: bool) -> None:
    batch = ScoredBatch(
        uids=("a",) * 7,
        rewards=torch.full((7,), 0.1),
        correct=torch.ones(7, dtype=torch.bool),
        loss_mask=torch.ones(7, 1, dtype=torch.bool),
        scores={},
    )
    advantages = compute_advantages(batch, AdvantageConfig(norm_by_std=norm_by_std)).advantages
    assert advantages.dtype == torch.float32
    assert advantages.abs().max().item() <= 1e-9


def test_flip_turns_the_sign_of_rows(make_scored: MakeScored) -> None:
    batch = make_scored(["a", "a"], [1.0, 0.0])
    flip = Flip(rows=torch.tensor([False, True]), stage="after_whiten")
    got = compute_advantages(batch, AdvantageConfig(norm_by_std=False), flip)
    assert got.advantages.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_no_rows(make_scored: MakeScored) -> None:
    empty = torch.zeros(0, 0, dtype=torch.bool)
    for name in ADVANTAGE_ESTIMATORS:
        batch = make_scored([], [], empty, values=empty.double())
        assert compute_advantages(batch, AdvantageConfig(estimator=name)).advantages.shape == (0, 0), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_names_its_row(make_scored: MakeScored, bad: float) -> None:
    with pytest.raises(DataError, match=r"reward of row 1 \(uid 'q7'\)"):
        compute_advantages(make_scored(["q6", "q7"], [1.0, bad]), AdvantageConfig())


@pytest.mark.parametrize("score", ["values", "kl_penalty"])
def test_non_finite_score_names_its_row(make_scored: MakeScored, score: str) -> None:
    bad = torch.tensor([[0.0, 0.0], [0.0, math.nan]], dtype=torch.float64)
    with pytest.raises(DataError, match=rf"sum of {score} of row 1 \(uid 'q7'\): got nan"):
        compute_advantages(make_scored(["q6", "q7"], [1.0, 0.0], **{score: bad}), AdvantageConfig(estimator="rloo"))


def test_unknown_estimator(make_scored: MakeScored) -> None:
    with pytest.raises(ConfigError, match=r"algo\.advantage\.estimator.*'grop'.*did you mean 'grpo'"):
        compute_advantages(make_scored(["a"], [1.0]), AdvantageConfig(estimator="grop"))
