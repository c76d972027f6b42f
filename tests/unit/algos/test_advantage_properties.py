"""What holds of every advantage estimator."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.advantages import ADVANTAGE_ESTIMATORS, Estimate, compute_advantages
from megarl.config.algo import AdvantageConfig
from megarl.types import ScoredBatch

MakeScored = Callable[..., ScoredBatch]

CONFIGS = [AdvantageConfig(estimator=name) for name in ADVANTAGE_ESTIMATORS] + [
    AdvantageConfig(estimator="grpo", norm_by_std=False),
    AdvantageConfig(estimator="grpo_split", norm_by_std=False),
    AdvantageConfig(estimator="reinforce_baseline", center=False),
    AdvantageConfig(estimator="reinforce_baseline", exclude_equal_groups=True),
    AdvantageConfig(estimator="reinforce_baseline", norm_by_std=False),
    AdvantageConfig(estimator="reinforce_max", uniform_scale=True),
    AdvantageConfig(estimator="reinforce_plus_plus", gamma=0.9),
    AdvantageConfig(estimator="passk", k=1),
    AdvantageConfig(estimator="gdpo", components={"score": 1.0, "correct": 0.5}),
    AdvantageConfig(estimator="passk_best", norm_by_std=False),
    AdvantageConfig(estimator="gae", gamma=0.9, lam=0.8, lam_critic=1.0, whiten=False),
    AdvantageConfig(estimator="gae", gamma=0.9, lam=0.8, whiten=False, credit="path"),
    AdvantageConfig(estimator="turn_returns", gamma=0.9, credit="path"),
]


@dataclass(frozen=True)
class Inputs:
    uids: list[str]
    rewards: list[float]
    mask: Tensor
    quantities: dict[str, Tensor]
    greedy: list[float]

    def permuted(self, order: list[int]) -> "Inputs":
        return Inputs(
            uids=[self.uids[i] for i in order],
            rewards=[self.rewards[i] for i in order],
            mask=self.mask[order],
            quantities={name: value[order] for name, value in self.quantities.items()},
            greedy=[self.greedy[i] for i in order],
        )

    def padded(self, width: int) -> "Inputs":
        """With columns outside the mask that hold NaN."""
        rows = len(self.uids)
        nan = torch.full((rows, width), math.nan, dtype=torch.float64)
        quantities = {name: torch.cat([value, nan], dim=1) for name, value in self.quantities.items()}
        # A demonstration mark is 0 or 1 everywhere; one outside the mask means nothing.
        quantities["demonstration"] = torch.cat([self.quantities["demonstration"], torch.ones_like(nan)], dim=1)
        mask = torch.cat([self.mask, torch.zeros(rows, width, dtype=torch.bool)], dim=1)
        return replace(self, mask=mask, quantities=quantities)

    def run(self, make_scored: MakeScored, cfg: AdvantageConfig) -> Estimate:
        batch = make_scored(self.uids, self.rewards, self.mask, **self.quantities)
        details = {"greedy_score": torch.tensor(self.greedy, dtype=torch.float64)}
        return compute_advantages(replace(batch, details=details), cfg)


@st.composite
def inputs(draw: st.DrawFn) -> Inputs:
    num_rows, width = draw(st.integers(1, 10)), draw(st.integers(0, 5))
    uids = draw(st.lists(st.sampled_from("abcd"), min_size=num_rows, max_size=num_rows))
    # Multiples of 1/4: sums are exact in any order, so that equal rewards stay equal.
    quarters = draw(st.lists(st.integers(8, 40), min_size=num_rows, max_size=num_rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def grid(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_rows, width), generator=generator).double()

    quantities = {"values": grid(-8, 9) / 4, "kl_penalty": grid(0, 3) / 8, "demonstration": grid(0, 2)}
    quantities |= {"old_logprobs": -grid(1, 9) / 4, "old_squares": grid(4, 8) / 8}
    rewards = [q / 4 for q in quarters]
    return Inputs(uids=uids, rewards=rewards, mask=grid(0, 3).bool(), quantities=quantities, greedy=rewards[::-1])


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@given(given_inputs=inputs(), data=st.data())
def test_properties(make_scored: MakeScored, cfg: AdvantageConfig, given_inputs: Inputs, data: st.DataObject) -> None:
    mask = given_inputs.mask
    before = {name: value.clone() for name, value in given_inputs.quantities.items()} | {"mask": mask.clone()}
    estimate = given_inputs.run(make_scored, cfg)
    got, returns = estimate.advantages, estimate.returns
    assert got.shape == mask.shape
    assert got.isfinite().all()
    assert not got[~mask].any()
    assert (returns is not None) == ADVANTAGE_ESTIMATORS.get(cfg.estimator).needs_values

    order = data.draw(st.permutations(range(len(given_inputs.uids))))
    shuffled = given_inputs.permuted(order).run(make_scored, cfg)
    torch.testing.assert_close(shuffled.advantages, got[order], rtol=1e-9, atol=1e-9)

    padded = given_inputs.padded(3).run(make_scored, cfg)
    width = mask.shape[1]
    torch.testing.assert_close(padded.advantages[:, :width], got, rtol=1e-9, atol=1e-9)
    assert not padded.advantages[:, width:].any()

    if returns is not None:
        assert shuffled.returns is not None
        assert padded.returns is not None
        torch.testing.assert_close(shuffled.returns, returns[order], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(padded.returns[:, :width], returns, rtol=1e-9, atol=1e-9)

    assert all(torch.equal(before[name], value) for name, value in given_inputs.quantities.items())
    assert torch.equal(before["mask"], mask)


@given(given_inputs=inputs())
def test_max_has_sum_zero_and_mean_square_one(make_scored: MakeScored, given_inputs: Inputs) -> None:
    got = given_inputs.run(make_scored, AdvantageConfig(estimator="reinforce_max")).advantages
    raw = ADVANTAGE_ESTIMATORS.get("reinforce_max").raw(
        make_scored(given_inputs.uids, given_inputs.rewards, given_inputs.mask, **given_inputs.quantities),
        AdvantageConfig(),
    )
    of_group = torch.tensor([uid == given_inputs.uids[0] for uid in given_inputs.uids])
    tokens, raw_tokens = got[of_group].flatten(), raw.advantages[of_group].flatten()
    counted = raw_tokens.abs() > 1e-12
    # The safeguards leave a group of one sign as it is, and bound the factors.
    assume(bool((raw_tokens[counted] > 0).any() and (raw_tokens[counted] < 0).any()))
    factors = tokens[counted] / raw_tokens[counted]
    assume(float(factors.max()) < 10)
    assert (factors > 0).all()
    assert tokens.sum().item() == pytest.approx(0.0, abs=1e-7)
    assert tokens[counted].square().mean().item() == pytest.approx(1.0, abs=1e-5)
    assert not tokens[~counted].abs().gt(1e-11).any()


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_float32_agrees_with_float64(cfg: AdvantageConfig) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(6, 5, generator=generator) < 0.8
    rewards = torch.tensor([1.0, 0.5, 2.0, 0.75, 1.0, 1.0])
    quantities = {"values": torch.randn(6, 5, generator=generator), "kl_penalty": torch.full((6, 5), 0.0625)}
    quantities |= {"old_logprobs": torch.full((6, 5), -0.5), "old_squares": torch.full((6, 5), 0.75)}

    def run(dtype: torch.dtype) -> Estimate:
        batch = ScoredBatch(
            uids=tuple("aaabbb"),
            rewards=rewards.to(dtype),
            correct=rewards > 0,
            loss_mask=mask,
            quantities={name: score.to(dtype) for name, score in quantities.items()},
            details={"greedy_score": rewards.flip(0).to(dtype)},
        )
        return compute_advantages(batch, cfg)

    single, double = run(torch.float32), run(torch.float64)
    assert single.advantages.dtype == torch.float32
    torch.testing.assert_close(single.advantages.double(), double.advantages, rtol=1e-6, atol=1e-6)
    if double.returns is not None:
        assert single.returns is not None
        assert single.returns.dtype == torch.float32
        torch.testing.assert_close(single.returns.double(), double.returns, rtol=1e-6, atol=1e-6)
