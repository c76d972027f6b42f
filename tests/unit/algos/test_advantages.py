"""Estimators that compare a row with its group, and what all estimators share."""

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
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


def test_opo_weighs_rewards_by_length(make_scored: MakeScored) -> None:
    # Lengths 1, 3, 4 and rewards 2, 1, 0: baseline (2 + 3) / 8. A group without loss tokens, and one of a single row.
    mask = torch.arange(4)[None, :] < torch.tensor([1, 3, 4, 0, 0, 2])[:, None]
    batch = make_scored(["a", "a", "a", "b", "b", "c"], [2.0, 1.0, 0.0, 1.0, 0.0, 3.0], mask)
    got = compute_advantages(batch, AdvantageConfig(estimator="opo")).advantages
    assert got[:3, 0].tolist() == pytest.approx([1.375, 0.375, -0.625])
    assert not got[3:5].any()
    assert got[5].tolist() == [3.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(5))
def test_opo_follows_its_definition(seed: int, make_scored: MakeScored) -> None:
    generator = random.Random(seed)
    lengths = [generator.randint(1, 6) for _ in range(8)]
    rewards = [generator.gauss(0.0, 1.0) for _ in range(8)]
    uids = list("abbabbab")
    mask = torch.arange(6)[None, :] < torch.tensor(lengths)[:, None]
    expected = []
    for uid, reward in zip(uids, rewards, strict=True):
        group = [i for i in range(8) if uids[i] == uid]
        expected.append(reward - sum(lengths[i] * rewards[i] for i in group) / sum(lengths[i] for i in group))
    assert rows_of(make_scored(uids, rewards, mask), AdvantageConfig(estimator="opo")) == pytest.approx(expected)


def test_gpg_makes_up_for_groups_of_equal_rewards(make_scored: MakeScored) -> None:
    # Of 7 rows, 3 are in a group of unequal rewards, a; all of b fail, and all of c succeed.
    batch = make_scored(["a", "a", "a", "b", "b", "c", "c"], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    third = 7 / 3 / 3
    expected = [2 * third, -third, -third, 0.0, 0.0, 0.0, 0.0]
    assert rows_of(batch, AdvantageConfig(estimator="gpg")) == pytest.approx(expected)


def test_gpg_of_nothing_but_equal_groups(make_scored: MakeScored) -> None:
    assert rows_of(make_scored(["a", "a"], [1.0, 1.0]), AdvantageConfig(estimator="gpg")) == [0.0, 0.0]


def test_passk_by_hand(make_scored: MakeScored) -> None:
    # One of four right, k = 2: 3 of 6 pairs have it, so mean and deviation are 1/2. A wrong row is in 3 pairs, 1 right.
    got = rows_of(make_scored(["a"] * 4, [0.0, 1.0, 0.0, 0.0]), AdvantageConfig(estimator="passk", k=2))
    assert got == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3], rel=1e-5)
    # Two of three right: every pair has one.
    assert rows_of(make_scored(["a"] * 3, [1.0, 1.0, 0.0]), AdvantageConfig(estimator="passk", k=2)) == [0.0] * 3


@pytest.mark.parametrize("k", [1, 2, 4, 7, 8, 12])
@pytest.mark.parametrize("num_right", range(9))
def test_passk_is_the_formula_of_the_paper(num_right: int, k: int, make_scored: MakeScored) -> None:
    n, k_of_n = 8, min(k, 8)
    success = 1 - math.comb(n - num_right, k_of_n) / math.comb(n, k_of_n)
    deviation = math.sqrt(success * (1 - success))
    wrong = 1 - success - math.comb(max(n - num_right - 1, 0), k_of_n - 1) / math.comb(n - 1, k_of_n - 1)
    rewards = [1.0] * num_right + [0.0] * (n - num_right)
    expected = [(1 - success if reward else wrong) / (deviation + 1e-6) for reward in rewards]
    got = rows_of(make_scored(["a"] * n, rewards), AdvantageConfig(estimator="passk", k=k))
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_passk_is_a_mean_over_sets_of_rows(k: int, make_scored: MakeScored) -> None:
    rewards = [0.5, -1.0, 0.5, 2.0, 0.25, -0.75]
    sets = list(itertools.combinations(range(6), k))
    best = [max(rewards[i] for i in rows) for rows in sets]
    deviation = statistics.pstdev(best) + 1e-6
    expected = [
        statistics.fmean(
            (b - statistics.fmean(best)) / deviation for b, rows in zip(best, sets, strict=True) if i in rows
        )
        for i in range(6)
    ]
    got = rows_of(make_scored(["a"] * 6, rewards), AdvantageConfig(estimator="passk", k=k))
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_passk_best(make_scored: MakeScored) -> None:
    # Rewards 0, 1, 2 have the deviation 1. Two best rows differ by nothing from the second best.
    batch = make_scored(["a", "b", "a", "b", "a", "b", "c"], [0.0, 1.0, 2.0, 1.0, 1.0, 0.0, 3.0])
    scaled = rows_of(batch, AdvantageConfig(estimator="passk_best"))
    assert scaled == pytest.approx([0.0, 0.0, 1 / (1 + 1e-6), 0.0, 0.0, 0.0, 3 / (1 + 1e-6)])
    plain = rows_of(batch, AdvantageConfig(estimator="passk_best", norm_by_std=False))
    assert plain == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("seed", range(5))
def test_passk_best_is_what_the_group_would_lose_without_the_row(seed: int, make_scored: MakeScored) -> None:
    generator = random.Random(seed)
    rewards = [float(generator.randint(0, 5)) for _ in range(6)]
    expected = [max(rewards) - max(rewards[:i] + rewards[i + 1 :]) for i in range(6)]
    got = rows_of(make_scored(["a"] * 6, rewards), AdvantageConfig(estimator="passk_best", norm_by_std=False))
    assert got == expected


def test_gdpo_by_hand(make_scored: MakeScored) -> None:
    # In group a the components disagree, and in group b they agree: sums of 0, 0, −2·√½ and 2·√½ with weights of 1.
    batch = replace(
        make_scored(["a", "a", "b", "b"], [1.0, 0.0, 0.0, 1.0]),
        details={"format": torch.tensor([0.0, 1.0, 0.0, 1.0])},
    )
    cfg = AdvantageConfig(estimator="gdpo", components={"correct": 1.0, "format": 1.0})
    # Their deviation is √(2·2 / 3).
    expected = [0.0, 0.0, -math.sqrt(1.5), math.sqrt(1.5)]
    assert rows_of(batch, cfg) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_follows_its_definition(seed: int, make_scored: MakeScored) -> None:
    generator = random.Random(seed)
    uids, weights = list("abbaabab"), {"score": 1.0, "style": -0.5, "length": 0.25}
    unused = {"format": 0.0}
    values = {name: [generator.gauss(0.0, 10.0) for _ in uids] for name in weights}
    total = [0.0] * len(uids)
    for name, weight in weights.items():
        for i, uid in enumerate(uids):
            group = [value for value, other in zip(values[name], uids, strict=True) if other == uid]
            total[i] += weight * (values[name][i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
    mean, deviation = statistics.fmean(total), statistics.stdev(total)
    details = {name: torch.tensor(values[name], dtype=torch.float64) for name in ("style", "length")}
    batch = replace(make_scored(uids, values["score"]), details=details)
    got = rows_of(batch, AdvantageConfig(estimator="gdpo", components=weights | unused))
    assert got == pytest.approx([(value - mean) / (deviation + 1e-6) for value in total])


def test_gdpo_refuses_a_row_without_a_component(make_scored: MakeScored) -> None:
    batch = replace(make_scored(["a", "b"], [1.0, 0.0]), details={"style": torch.tensor([0.5, math.nan])})
    message = r"^row 1 \(uid 'b'\) has no number 'style' beside its reward, but correct, score; change algo\.advantage"
    with pytest.raises(DataError, match=message):
        compute_advantages(batch, AdvantageConfig(estimator="gdpo", components={"style": 1.0}))
    with pytest.raises(DataError, match=r"^row 0 \(uid 'a'\) has no number 'stile' .* but correct, score, style;"):
        compute_advantages(batch, AdvantageConfig(estimator="gdpo", components={"stile": 1.0}))


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


def test_gdpo_with_a_function_for_some_sources(make_scored: MakeScored) -> None:
    """Nobody asks the function about group b: neither its reward nor another of its numbers is there."""
    values = torch.tensor([1.0, 3.0, math.nan, math.nan])
    batch = replace(
        make_scored(list("aabb"), [0.0] * 4),
        details={"f/score": values, "f/style": values},
        no_opinion={"f/score": values.isnan()},
    )
    # ∓√½ in a and 0 in b, whose deviation together is √(1/3).
    for name in ("f/score", "f/style"):
        got = rows_of(batch, AdvantageConfig(estimator="gdpo", components={name: 1.0}))
        assert got == pytest.approx([-math.sqrt(1.5), math.sqrt(1.5), 0.0, 0.0], rel=1e-5)


def test_gdpo_without_any_opinion(make_scored: MakeScored) -> None:
    batch = replace(
        make_scored(["a", "a"], [1.0, 0.0]),
        details={"style": torch.tensor([math.nan] * 2)},
        no_opinion={"style": torch.tensor([True] * 2)},
    )
    assert rows_of(batch, AdvantageConfig(estimator="gdpo", components={"style": 1.0})) == [0.0, 0.0]


def test_groups_of_one_have_no_baseline(make_scored: MakeScored) -> None:
    batch = make_scored(["a"], [3.0])
    expected = {"grpo": 3 / (1 + 1e-6), "grpo_split": 3 / (1 + 1e-6), "group_norm": 3 / (1 + 1e-9)}
    expected |= {"opo": 3.0, "gpg": 3.0, "passk": 0.0, "passk_best": 3 / (1 + 1e-6)}
    expected |= {"dr_grpo": 3.0, "rloo": 3.0, "reinforce_max": 3.0, "maxrl": 0.0}
    for name, value in expected.items():
        assert rows_of(batch, AdvantageConfig(estimator=name)) == [pytest.approx(value)], name


@pytest.mark.parametrize("name", ["grpo", "grpo_split", "dr_grpo", "rloo", "opo", "gpg", "passk_best"])
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
        quantities={},
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS))
def test_non_finite_reward_of_a_turn_names_its_row(make_scored: MakeScored, name: str, bad: float) -> None:
    # 1e39 is infinite in float32, the type of quantities.
    turns = torch.tensor([[0.0, 0.0], [bad, 0.5]], dtype=torch.float32)
    batch = make_scored(["q6", "q7"], [1.0, 0.0], turn_rewards=turns, values=torch.zeros(2, 2))
    with pytest.raises(DataError, match=r"sum of turn_rewards of row 1 \(uid 'q7'\): got"):
        compute_advantages(batch, AdvantageConfig(estimator=name, components={"score": 1.0}))


def test_advantages_that_do_not_fit_their_type_name_their_row(make_scored: MakeScored) -> None:
    batch = make_scored(["q6", "q6"], [3e38, -3e38])
    assert compute_advantages(batch, AdvantageConfig(estimator="rloo")).advantages[0, 0] == pytest.approx(6e38)
    with pytest.raises(DataError, match=r"sum of advantages of row 0 \(uid 'q6'\): got inf.*make the rewards smaller"):
        compute_advantages(replace(batch, rewards=batch.rewards.float()), AdvantageConfig(estimator="rloo"))


def test_gpg_scales_in_the_precision_of_rewards(make_scored: MakeScored) -> None:
    # α = 10/6; in float32 it would be off by 4e-8.
    rewards = [1.0, 0.0] * 3 + [1.0] * 4
    got = rows_of(make_scored(list("aabbccdddd"), rewards), AdvantageConfig(estimator="gpg"))
    assert got == pytest.approx([5 / 6, -5 / 6] * 3 + [0.0] * 4, rel=1e-15)


def test_unknown_estimator(make_scored: MakeScored) -> None:
    with pytest.raises(ConfigError, match=r"algo\.advantage\.estimator.*'grop'.*did you mean 'grpo'"):
        compute_advantages(make_scored(["a"], [1.0]), AdvantageConfig(estimator="grop"))
