"""REINFORCE with and without group baselines: returns, and their scale over the batch or the group."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.advantages import compute_advantages
from megarl.algos.advantages.reinforce import max_normalised
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
