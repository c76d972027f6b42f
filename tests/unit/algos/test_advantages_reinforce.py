"""REINFORCE with and without group baselines: returns, and their scale over the batch or the group."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.advantages import compute_advantages
from megarl.algos.advantages.reinforce import batch_whitened, max_normalised
from megarl.config.algo import AdvantageConfig
from megarl.errors import DataError
from megarl.types import ScoredBatch

MakeScored = Callable[..., ScoredBatch]


def lengths_mask(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]


def of_groups(make_scored: MakeScored, rewards: list[list[float]], lengths: list[list[int]]) -> ScoredBatch:
    uids = [f"q{i}" for i, group in enumerate(rewards) for _ in group]
    mask = lengths_mask([n for group in lengths for n in group])
    return make_scored(uids, [r for group in rewards for r in group], mask)


def check_row_constants(got: Tensor, mask: Tensor, expected: list[list[float]], case: Any, check_golden: Any) -> None:
    rows = torch.tensor(expected, dtype=torch.float64).flatten()
    check_golden(got, torch.where(mask, rows[:, None], 0.0), case)


def test_baseline_golden(golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden("D.reinforce_pp_baseline")
    batch = of_groups(make_scored, **case["inputs"])
    got = compute_advantages(batch, AdvantageConfig(estimator="reinforce_baseline"))
    check_row_constants(got.advantages, batch.loss_mask, case["expected"]["adv_per_sequence"], case, check_golden)
    # norm_by_std off: A − μ, and μ, var are those of the golden case.
    shifted = compute_advantages(batch, AdvantageConfig(estimator="reinforce_baseline", norm_by_std=False))
    ratio = shifted.advantages[batch.loss_mask] / got.advantages[batch.loss_mask]
    check_golden(ratio.square(), torch.full_like(ratio, case["expected"]["var"]), case)
    raw = torch.tensor([0.5, -0.5, -0.5, 0.5] + [0.0] * 8, dtype=torch.float64)
    check_golden(raw - shifted.advantages[:, 0], torch.full_like(raw, case["expected"]["mean"]), case)


def test_returns_with_kl_golden(golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden("D.returns_with_kl")
    penalty = case["params"]["kl_coef"] * torch.tensor([case["inputs"]["kl"]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    batch = make_scored(["a"], [case["inputs"]["shaped_reward"]], mask, kl_penalty=penalty)
    # A group of one sign stays as it is: its returns.
    got = compute_advantages(batch, AdvantageConfig(estimator="reinforce_max"))
    check_golden(got.advantages[0], case["expected"], case)


def test_without_centring_groups_of_equal_rewards_stay_at_zero(golden: Any, make_scored: MakeScored) -> None:
    batch = of_groups(make_scored, **golden("D.reinforce_pp_baseline")["inputs"])
    got = compute_advantages(batch, AdvantageConfig(estimator="reinforce_baseline", center=False)).advantages
    assert not got[4:].any()
    # ±0.5 on 10 of the batch's 26 tokens: mean square 10/26 · 0.25.
    expected = 0.5 / math.sqrt(10 / 26 * 0.25)
    assert got[:4, 0].tolist() == pytest.approx([expected, -expected, -expected, expected])


def test_equal_groups_outside_the_statistics(golden: Any, make_scored: MakeScored) -> None:
    batch = of_groups(make_scored, **golden("D.reinforce_pp_baseline")["inputs"])
    cfg = AdvantageConfig(estimator="reinforce_baseline", exclude_equal_groups=True)
    got = compute_advantages(batch, cfg).advantages
    # Tokens of the first group: 4 of +0.5, 6 of −0.5. μ = −0.1, σ² = 0.25 − 0.01; the others stay at 0.
    high, low = 0.6 / math.sqrt(0.24), -0.4 / math.sqrt(0.24)
    assert got[:4, 0].tolist() == pytest.approx([high, low, low, high])
    assert not got[4:].any()


def test_nothing_but_equal_groups(make_scored: MakeScored) -> None:
    penalty = torch.tensor([[0.25, 0.5], [0.25, 0.5]], dtype=torch.float64)
    batch = make_scored(["a", "a"], [1.0, 1.0], kl_penalty=penalty)
    cfg = AdvantageConfig(estimator="reinforce_baseline", exclude_equal_groups=True)
    # No statistics to scale by: the returns of the KL penalty.
    assert compute_advantages(batch, cfg).advantages.tolist() == [[-0.75, -0.5]] * 2


def test_baseline_of_single_samples_is_whitened_reward(make_scored: MakeScored) -> None:
    # REINFORCE++: rewards 3 and 1 on two tokens each, μ = 2, σ = 1.
    got = compute_advantages(make_scored(["a", "b"], [3.0, 1.0]), AdvantageConfig(estimator="reinforce_baseline"))
    assert got.advantages.tolist() == [[1.0, 1.0], [-1.0, -1.0]]


def test_plus_plus_by_hand(make_scored: MakeScored) -> None:
    # γ = 1/2 skips the third token, which is no loss token; a penalty of 1 on the first: 8/4 − 1, 8/2 and 8. Row 2: 0.
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    penalty = torch.tensor([[1.0, 0.0, 9.0, 0.0], [0.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
    batch = make_scored(["a", "b"], [8.0, 0.0], mask, kl_penalty=penalty)
    cfg = AdvantageConfig(estimator="reinforce_plus_plus", gamma=0.5)
    returns = [1.0, 4.0, 8.0, 0.0]
    mean = sum(returns) / 4
    deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / 4)
    got = compute_advantages(batch, cfg).advantages
    assert got[mask].tolist() == pytest.approx([(value - mean) / deviation for value in returns])
    shifted = compute_advantages(batch, replace(cfg, norm_by_std=False)).advantages
    assert shifted[mask].tolist() == [value - mean for value in returns]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_plus_plus_follows_its_definition(gamma: float, make_scored: MakeScored) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths, rewards = [4, 1, 3, 5], [1.0, -0.5, 0.25, 2.0]
    penalty = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    returns: list[float] = []
    for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        of_row = [0.0]
        for t in reversed(range(length)):
            token_reward = (reward if t == length - 1 else 0.0) - float(penalty[i, t])
            of_row.insert(0, token_reward + gamma * of_row[0])
        returns += of_row[:-1]
    mean, deviation = statistics.fmean(returns), statistics.pstdev(returns)
    mask = lengths_mask(lengths)
    batch = make_scored(["a", "a", "b", "c"], rewards, mask, kl_penalty=penalty)
    got = compute_advantages(batch, AdvantageConfig(estimator="reinforce_plus_plus", gamma=gamma)).advantages
    assert got[mask].tolist() == pytest.approx([(value - mean) / deviation for value in returns])


def test_remax_by_hand(make_scored: MakeScored) -> None:
    # Rewards less 0.5 and 2, then what follows of −1/4 on every token.
    batch = replace(
        make_scored(["a", "b"], [1.0, 1.0], kl_penalty=torch.full((2, 2), 0.25, dtype=torch.float64)),
        details={"greedy_score": torch.tensor([0.5, 2.0])},
    )
    got = compute_advantages(batch, AdvantageConfig(estimator="remax")).advantages
    assert got.tolist() == [[0.0, 0.25], [-1.5, -1.25]]


def test_remax_needs_greedy_responses(make_scored: MakeScored) -> None:
    with pytest.raises(DataError, match=r"^row 0 \(uid 'a'\) has no number 'greedy_score' .* correct, score; collect"):
        compute_advantages(make_scored(["a"], [1.0]), AdvantageConfig(estimator="remax"))


def test_whitening_nothing(make_scored: MakeScored) -> None:
    batch = make_scored(["a"], [1.0], torch.zeros(1, 2, dtype=torch.bool))
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    assert torch.equal(batch_whitened(zeros, batch, AdvantageConfig()), zeros)


def test_max_binary_group_golden(golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden("D.max.binary_group")
    mask = lengths_mask(case["inputs"]["lengths"])
    advantages = torch.tensor(case["inputs"]["adv_per_sequence"], dtype=torch.float64)[:, None] * mask
    got = max_normalised(advantages, make_scored(["a"] * 4, [0.0] * 4, mask), AdvantageConfig())
    check_row_constants(got, mask, [case["expected"]["normed_per_sequence"]], case, check_golden)
    # The same from rewards.
    batch = make_scored(["a"] * 4, [1.0, 0.0, 0.0, 1.0], mask)
    got = compute_advantages(batch, AdvantageConfig(estimator="reinforce_max")).advantages
    check_row_constants(got, mask, [case["expected"]["normed_per_sequence"]], case, check_golden)


@pytest.mark.parametrize("case_id", ["D.max.tokenwise", "D.max.clamp", "D.max.same_sign"])
def test_max_golden(case_id: str, golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden(case_id)
    advantages = torch.tensor(case["inputs"]["adv"], dtype=torch.float64)
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    got = max_normalised(advantages, make_scored(["a"] * len(mask), [0.0] * len(mask), mask), AdvantageConfig())
    check_golden(got, case["expected"]["normed"], case)


def test_max_uniform_scale_golden(golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden("D.max.uniform_scale")
    batch = of_groups(make_scored, **case["inputs"])
    got = compute_advantages(batch, AdvantageConfig(estimator="reinforce_max", uniform_scale=True)).advantages
    check_row_constants(got, batch.loss_mask, case["expected"], case, check_golden)


def test_uniform_scale_leaves_equal_groups_unnormalised(make_scored: MakeScored) -> None:
    # Rewards ±: r/n = 0.5 on the last token; penalties give both signs, which would otherwise be rescaled.
    penalty = torch.tensor([[0.75, 0.0], [0.0, 0.75]], dtype=torch.float64)
    batch = make_scored(["a", "a"], [1.0, 1.0], kl_penalty=penalty)
    got = compute_advantages(batch, AdvantageConfig(estimator="reinforce_max", uniform_scale=True)).advantages
    assert got.tolist() == [[-0.25, 0.5], [-0.25, -0.25]]


def test_max_bounds_the_squares_of_the_negative_tokens(make_scored: MakeScored) -> None:
    # S⁺ = 1e6, S⁻ = −1, Q⁻ = 1: (S⁺/S⁻)²·Q⁻ = 1e12 counts as 1e8. α = √(2 / (1e12 + 1e8)), β = 1e6·α.
    advantages = torch.tensor([[1e6, -1.0]], dtype=torch.float64)
    got = max_normalised(advantages, make_scored(["a"], [0.0]), AdvantageConfig())
    alpha = math.sqrt(2 / (1e12 + 1e8))
    assert got[0].tolist() == pytest.approx([1e6 * alpha, -1e6 * alpha], rel=1e-9)


def test_max_ignores_rounding_residues(make_scored: MakeScored) -> None:
    # 0.1 + 0.2 − 0.3 leaves 5.6e-17: not a token that counts.
    exact = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    residue = torch.tensor([[1.0, -1.0, 0.1 + 0.2 - 0.3]], dtype=torch.float64)
    batch = make_scored(["a"], [0.0], torch.ones(1, 3, dtype=torch.bool))
    got = [max_normalised(x, batch, AdvantageConfig())[0, :2].tolist() for x in (exact, residue)]
    assert got[0] == got[1]
