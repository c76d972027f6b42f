import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos.advantages import compute_advantages, grpo
from megarl.config.schema import AdvantageConfig
from megarl.errors import ConfigError, DataError
from megarl.types import ScoredBatch

MakeScored = Callable[..., ScoredBatch]


@pytest.mark.parametrize("case_id", ["C.grpo.std_True", "C.grpo.std_False", "C.grpo.single"])
def test_grpo_golden(case_id: str, golden: Any, check_golden: Any, make_scored: MakeScored) -> None:
    case = golden(case_id)
    mask = torch.ones(len(case["inputs"]["uid"]), 3, dtype=torch.bool)
    mask[0, 2] = False
    batch = make_scored(case["inputs"]["uid"], case["inputs"]["reward"], mask)
    got = grpo(batch, AdvantageConfig(norm_by_std=case["params"]["norm_by_std"]))
    expected = torch.tensor(case["expected"], dtype=torch.float64)[:, None] * mask
    assert got.dtype == torch.float64
    check_golden(got, expected, case)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_float32_rewards_carry_no_signal(norm_by_std: bool) -> None:
    batch = ScoredBatch(
        uids=("a",) * 7,
        rewards=torch.full((7,), 0.1),
        correct=torch.ones(7, dtype=torch.bool),
        loss_mask=torch.ones(7, 1, dtype=torch.bool),
        scores={},
    )
    advantages = grpo(batch, AdvantageConfig(norm_by_std=norm_by_std))
    assert advantages.dtype == torch.float32
    assert advantages.abs().max().item() <= 1e-9


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[str], list[float], torch.Tensor, list[int]]:
    """uids, rewards, a loss mask [B, T] and a permutation of the rows."""
    num_rows = draw(st.integers(1, 12))
    uids = draw(st.lists(st.sampled_from("abcd"), min_size=num_rows, max_size=num_rows))
    # Multiples of 1/4: sums are exact in any order, so that equal rewards stay equal.
    quarters = draw(st.lists(st.integers(-40, 40), min_size=num_rows, max_size=num_rows))
    width = draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(0, width), min_size=num_rows, max_size=num_rows))
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    return uids, [q / 4 for q in quarters], mask, draw(st.permutations(range(num_rows)))


@settings(deadline=None, max_examples=60)
@given(data=groups(), norm_by_std=st.booleans())
def test_grpo_properties(
    make_scored: MakeScored,
    data: tuple[list[str], list[float], torch.Tensor, list[int]],
    norm_by_std: bool,
) -> None:
    uids, rewards, mask, order = data
    cfg = AdvantageConfig(norm_by_std=norm_by_std)
    batch = make_scored(uids, rewards, mask)
    before = (batch.rewards.clone(), batch.loss_mask.clone())
    got = grpo(batch, cfg)
    assert got.shape == mask.shape

    # Outside the mask 0; the same number on every token of a row.
    assert not got[~mask].any()
    assert all(len(set(row[m].tolist())) <= 1 for row, m in zip(got, mask, strict=True))

    # Equivariant under a permutation of the rows.
    shuffled = make_scored([uids[i] for i in order], [rewards[i] for i in order], mask[order])
    torch.testing.assert_close(grpo(shuffled, cfg), got[order], rtol=0, atol=1e-12)

    # Invariant to appended padding.
    padding = torch.zeros(len(uids), 3, dtype=torch.bool)
    padded = grpo(make_scored(uids, rewards, torch.cat([mask, padding], dim=1)), cfg)
    assert torch.equal(padded[:, : mask.shape[1]], got)
    assert not padded[:, mask.shape[1] :].any()

    assert torch.equal(batch.rewards, before[0])
    assert torch.equal(batch.loss_mask, before[1])


def test_no_rows(make_scored: MakeScored) -> None:
    batch = make_scored([], [], torch.zeros(0, 0, dtype=torch.bool))
    assert compute_advantages(batch, AdvantageConfig()).shape == (0, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_names_its_row(make_scored: MakeScored, bad: float) -> None:
    with pytest.raises(DataError, match=r"row 1 \(uid 'q7'\)"):
        compute_advantages(make_scored(["q6", "q7"], [1.0, bad]), AdvantageConfig())


def test_unknown_estimator(make_scored: MakeScored) -> None:
    with pytest.raises(ConfigError, match=r"algo\.advantage\.estimator.*'grop'.*did you mean 'grpo'"):
        compute_advantages(make_scored(["a"], [1.0]), AdvantageConfig(estimator="grop"))
