"""Estimators that compare a row with its group, and what all estimators share."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, compute_advantages
from megarl.config.algo import AdvantageConfig
from megarl.errors import DataError
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


def test_rloo_golden(golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden("D.rloo")
    groups = case["inputs"]["rewards"]
    uids = [f"q{i}" for i, group in enumerate(groups) for _ in group]
    batch = make_scored(uids, [r for group in groups for r in group])
    got = torch.tensor(rows_of(batch, AdvantageConfig(estimator="rloo"))).view(len(groups), -1)
    check_golden(got, case["expected"], case)


def test_group_norm(make_scored: MakeScored) -> None:
    # Rewards 0, 1, 2: mean 1, unbiased deviation 1. A group of equal rewards: 0 / 1e-9.
    batch = make_scored(["a", "a", "a", "b", "b"], [0.0, 1.0, 2.0, 0.25, 0.25])
    expected = [-1 / (1 + 1e-9), 0.0, 1 / (1 + 1e-9), 0.0, 0.0]
    assert rows_of(batch, AdvantageConfig(estimator="group_norm")) == pytest.approx(expected, rel=1e-14, abs=0)


def test_maxrl(make_scored: MakeScored) -> None:
    # p = 1/4: (1 − p)/p = 3 and −1. p = 1 and p = 0: nothing to learn.
    batch = make_scored(["a"] * 4 + ["b"] * 2 + ["c"] * 2, [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert rows_of(batch, AdvantageConfig(estimator="maxrl")) == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_gpg_makes_up_for_groups_of_equal_rewards(make_scored: MakeScored) -> None:
    # Of 7 rows, 3 are in a group of unequal rewards, a; all of b fail, and all of c succeed.
    batch = make_scored(["a", "a", "a", "b", "b", "c", "c"], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    third = 7 / 3 / 3
    expected = [2 * third, -third, -third, 0.0, 0.0, 0.0, 0.0]
    assert rows_of(batch, AdvantageConfig(estimator="gpg")) == pytest.approx(expected)


def test_passk_by_hand(make_scored: MakeScored) -> None:
    # One of four right, k = 2: 3 of 6 pairs have it, so mean and deviation are 1/2. A wrong row is in 3 pairs, 1 right.
    got = rows_of(make_scored(["a"] * 4, [0.0, 1.0, 0.0, 0.0]), AdvantageConfig(estimator="passk", k=2))
    assert got == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3], rel=1e-5)
    # Two of three right: every pair has one.
    assert rows_of(make_scored(["a"] * 3, [1.0, 1.0, 0.0]), AdvantageConfig(estimator="passk", k=2)) == [0.0] * 3


@pytest.mark.parametrize(("num_right", "k"), [(0, 2), (1, 1), (3, 4), (3, 8), (7, 2), (8, 12)])
def test_passk_is_the_formula_of_the_paper(num_right: int, k: int, make_scored: MakeScored) -> None:
    n, k_of_n = 8, min(k, 8)
    success = 1 - math.comb(n - num_right, k_of_n) / math.comb(n, k_of_n)
    deviation = math.sqrt(success * (1 - success))
    wrong = 1 - success - math.comb(max(n - num_right - 1, 0), k_of_n - 1) / math.comb(n - 1, k_of_n - 1)
    rewards = [1.0] * num_right + [0.0] * (n - num_right)
    expected = [(1 - success if reward else wrong) / (deviation + 1e-6) for reward in rewards]
    got = rows_of(make_scored(["a"] * n, rewards), AdvantageConfig(estimator="passk", k=k))
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_gdpo_by_hand(make_scored: MakeScored) -> None:
    # In group a the components disagree, and in group b they agree: sums of 0, 0, −2·√½ and 2·√½ with weights of 1.
    batch = replace(
        make_scored(["a", "a", "b", "b"], [1.0, 0.0, 0.0, 1.0]),
        details={"format": torch.tensor([0.0, 1.0, 0.0, 1.0])},
    )
    cfg = AdvantageConfig(estimator="gdpo", components={"correct": 1.0, "format": 1.0, "unheard": 0.0})
    # Their deviation is √(2·2 / 3).
    expected = [0.0, 0.0, -math.sqrt(1.5), math.sqrt(1.5)]
    assert rows_of(batch, cfg) == pytest.approx(expected, rel=1e-5)


def test_gdpo_leaves_rows_out_on_which_nobody_has_an_opinion(make_scored: MakeScored) -> None:
    """Three opinions on group a, one on b, two on c, which a fourth row of c lacks, and none on d."""
    nan = math.nan
    style = torch.tensor([1.0, 2.0, 3.0, nan, 5.0, nan, 0.0, 1.0, nan, nan, nan])
    batch = replace(
        make_scored(list("aaaabbcccdd"), [0.0] * 11), details={"style": style}, no_opinion={"style": style.isnan()}
    )
    # By hand: −1, 0, 1 (deviation 1) in a; ∓√½ in c (deviation √½); a single opinion is compared with nothing.
    sums = [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, -math.sqrt(0.5), math.sqrt(0.5), 0.0, 0.0, 0.0]
    deviation = math.sqrt((1 + 1 + 0.5 + 0.5) / 10)
    cfg = AdvantageConfig(estimator="gdpo", components={"style": 0.5})
    assert rows_of(batch, cfg) == pytest.approx([value / deviation for value in sums], rel=1e-5)
    # The other component counts where this one is silent; weights of 1 make S of group d ∓√½.
    correct = torch.tensor([False] * 9 + [False, True])
    both = AdvantageConfig(estimator="gdpo", components={"style": 1.0, "correct": 1.0})
    spread = math.sqrt((1 + 1 + 4 * 0.5) / 10)
    sums = [*sums[:9], -math.sqrt(0.5), math.sqrt(0.5)]
    got = rows_of(replace(batch, correct=correct), both)
    assert got == pytest.approx([value / spread for value in sums], rel=1e-5)
    with pytest.raises(DataError, match=r"^row 3 \(uid 'a'\) has no number 'style'"):
        compute_advantages(replace(batch, no_opinion={}), cfg)


@pytest.mark.parametrize("score", ["values", "kl_penalty"])
def test_a_non_finite_number_names_its_row(make_scored: MakeScored, score: str) -> None:
    with pytest.raises(DataError, match=r"reward of row 1 \(uid 'q7'\)"):
        compute_advantages(make_scored(["q6", "q7"], [1.0, math.nan]), AdvantageConfig())
    bad = torch.tensor([[0.0, 0.0], [0.0, math.nan]], dtype=torch.float64)
    with pytest.raises(DataError, match=rf"sum of {score} of row 1 \(uid 'q7'\): got nan"):
        compute_advantages(make_scored(["q6", "q7"], [1.0, 0.0], **{score: bad}), AdvantageConfig(estimator="rloo"))


@pytest.mark.parametrize("bad", [math.nan, 1e39])
def test_non_finite_reward_of_a_turn_names_its_row(make_scored: MakeScored, bad: float) -> None:
    # 1e39 is infinite in float32, the type of quantities.
    turns = torch.tensor([[0.0, 0.0], [bad, 0.5]], dtype=torch.float32)
    batch = make_scored(["q6", "q7"], [1.0, 0.0], turn_rewards=turns, values=torch.zeros(2, 2))
    for name in ADVANTAGE_ESTIMATORS:
        with pytest.raises(DataError, match=r"sum of turn_rewards of row 1 \(uid 'q7'\): got"):
            compute_advantages(batch, AdvantageConfig(estimator=name, components={"score": 1.0}))


def test_advantages_that_do_not_fit_their_type_name_their_row(make_scored: MakeScored) -> None:
    batch = make_scored(["q6", "q6"], [3e38, -3e38])
    assert compute_advantages(batch, AdvantageConfig(estimator="rloo")).advantages[0, 0] == pytest.approx(6e38)
    with pytest.raises(DataError, match=r"sum of advantages of row 0 \(uid 'q6'\): got inf.*make the rewards smaller"):
        compute_advantages(replace(batch, rewards=batch.rewards.float()), AdvantageConfig(estimator="rloo"))


def test_opo_weighs_rewards_by_length(make_scored: MakeScored) -> None:
    # Lengths 1, 3, 4 and rewards 2, 1, 0: baseline (2 + 3) / 8. A group without loss tokens, and one of a single row.
    mask = torch.arange(4)[None, :] < torch.tensor([1, 3, 4, 0, 0, 2])[:, None]
    batch = make_scored(["a", "a", "a", "b", "b", "c"], [2.0, 1.0, 0.0, 1.0, 0.0, 3.0], mask)
    got = compute_advantages(batch, AdvantageConfig(estimator="opo")).advantages
    assert got[:3, 0].tolist() == pytest.approx([1.375, 0.375, -0.625])
    assert not got[3:5].any()
    assert got[5].tolist() == [3.0, 3.0, 0.0, 0.0]


def test_maxrl_refuses_negative_rewards(make_scored: MakeScored) -> None:
    with pytest.raises(DataError, match=r"row 1 \(uid 'b'\): got -1\.0, expected >= 0 with .*maxrl"):
        compute_advantages(make_scored(["a", "b"], [1.0, -1.0]), AdvantageConfig(estimator="maxrl"))
