"""Tokens chosen by the covariance of log-prob and advantage, and the losses that treat these in another way."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algos.build import build_algorithm
from megarl.algos.covariance import CHOSEN, choose_tokens, token_covariance
from megarl.algos.prefixes import DEMONSTRATION
from megarl.config.algo import AlgoConfig, PolicyLossConfig
from megarl.errors import ConfigError
from megarl.types import Algorithm, AlgoState, PolicyOutputs, RowBatch
from tests.helpers.objectives import append_padding
from tests.helpers.steps import MAX_RESPONSE_TOKENS, Step, problem_of, random_step

# Two rows of two tokens, and one outside the mask. The mean advantage is 0, the mean log-prob −3, so the tokens have
# 2·2 = 4 and 0·1 = 0, then −1·−1 = 1 and −1·−2 = 2.
MASK = torch.tensor([[True, True, False], [True, True, False]])
ADVANTAGES = torch.tensor([[2.0, 0.0, 0.0], [-1.0, -1.0, 0.0]], dtype=torch.float64)
LOGPROBS = torch.tensor([[-1.0, -2.0, 0.0], [-4.0, -5.0, math.nan]], dtype=torch.float64)
COVARIANCE = [[4.0, 0.0, 0.0], [1.0, 2.0, 0.0]]


def chosen(cfg: PolicyLossConfig, seed: int = 0) -> list[tuple[int, int]]:
    """Row and index of the tokens chosen of the rows above."""
    covariance = token_covariance(ADVANTAGES, LOGPROBS, MASK)
    return [(r, t) for r, t in choose_tokens(covariance, MASK, cfg, uids="ab", seed=seed).nonzero().tolist()]


def test_covariance_by_hand() -> None:
    covariance = token_covariance(ADVANTAGES, LOGPROBS, MASK)
    assert covariance.tolist() == COVARIANCE
    # (4 + 0 + 1 + 2) / 4, as numpy has it.
    values = [tensor[MASK].numpy() for tensor in (ADVANTAGES, LOGPROBS)]
    assert covariance[MASK].mean().item() == pytest.approx(float(np.cov(*values, bias=True)[0, 1])) == 1.75


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, [(0, 0), (1, 1)]), (0.75, [(0, 0), (1, 0), (1, 1)]), (1e-4, [(0, 0)])]
)
def test_kl_cov_takes_the_largest_and_at_least_one(share: float, expected: list[tuple[int, int]]) -> None:
    assert chosen(PolicyLossConfig(name="kl_cov", cov_share=share)) == expected


def test_clip_cov_draws_among_tokens_between_its_bounds() -> None:
    # The bounds 1 and 5 leave out 0, and 1 itself: 4 and 2 remain.
    assert chosen(PolicyLossConfig(name="clip_cov", cov_share=0.5)) == [(0, 0), (1, 1)]
    assert chosen(PolicyLossConfig(name="clip_cov", cov_share=1.0)) == [(0, 0), (1, 1)]
    assert chosen(PolicyLossConfig(name="clip_cov", cov_share=1.0, cov_high=3.0)) == [(1, 1)]
    assert chosen(PolicyLossConfig(name="clip_cov", cov_low=5.0, cov_high=6.0)) == []
    # One of the two, each in half of 400 steps: a standard deviation is 10.
    one = [chosen(PolicyLossConfig(name="clip_cov", cov_share=0.25), seed) for seed in range(400)]
    counts = Counter(token for (token,) in one)
    assert set(counts) == {(0, 0), (1, 1)}
    assert abs(counts[0, 0] - 200) < 50


def test_tokens_of_equal_covariance_are_drawn() -> None:
    cfg = PolicyLossConfig(name="kl_cov", cov_share=0.2)
    nothing, mask = torch.zeros(4, 5), torch.ones(4, 5, dtype=torch.bool)
    seen = {
        tuple(choose_tokens(nothing, mask, cfg, uids="aabb", seed=s).nonzero().flatten().tolist()) for s in range(9)
    }
    assert len(seen) == 9


def test_without_tokens_nothing_is_chosen() -> None:
    for shape in ((0, 4), (2, 4)):
        mask = torch.zeros(shape, dtype=torch.bool)
        covariance = token_covariance(torch.zeros(shape), torch.zeros(shape), mask)
        for name in ("clip_cov", "kl_cov"):
            got = choose_tokens(covariance, mask, PolicyLossConfig(name=name), uids="ab"[: shape[0]], seed=0)
            assert got.shape == shape
            assert not got.any()


# --- as a step's algorithm


def config(name: str, **options: float) -> AlgoConfig:
    return AlgoConfig(policy_loss=PolicyLossConfig(name=name, dual_clip=None, **options))


def algorithm(cfg: AlgoConfig) -> Algorithm:
    return build_algorithm(cfg, max_response_tokens=MAX_RESPONSE_TOKENS)


def shares(step: Step, cfg: AlgoConfig) -> Tensor:
    return algorithm(cfg).advantages(step.batch, AlgoState()).quantities[CHOSEN]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_neither_the_order_of_groups_nor_padding_decides(name: str) -> None:
    step = random_step([3, 2, 4], seed=5)
    cfg = config(name, cov_share=0.3, **({"cov_low": 0.1} if name == "clip_cov" else {}))
    whole = shares(step, cfg)
    assert 0 < whole.sum() < step.batch.loss_mask.sum() / 2
    order = [5, 6, 7, 8, 0, 1, 2, 3, 4]
    assert torch.equal(shares(step.rows(order), cfg), whole[order])
    assert torch.equal(shares(step.columns(append_padding), cfg)[:, :MAX_RESPONSE_TOKENS], whole)
    another = replace(step, batch=replace(step.batch, seed=99))
    assert torch.equal(shares(another, cfg), whole) == (name == "kl_cov")


def test_demonstrations_neither_count_nor_are_chosen() -> None:
    step = random_step([4, 4], seed=8, demonstrations=True)
    demonstrated = step.batch.quantities[DEMONSTRATION] > 0
    assert (demonstrated & step.batch.loss_mask).any()
    cfg = config("kl_cov", cov_share=1.0)
    assert torch.equal(shares(step, cfg) > 0, step.batch.loss_mask & ~demonstrated)
    metrics = algorithm(cfg).advantages(step.batch, AlgoState()).metrics
    rows = step.batch.loss_mask & ~demonstrated
    advantages = algorithm(cfg).advantages(step.batch, AlgoState()).values
    values = [tensor[rows].numpy() for tensor in (advantages, step.batch.quantities["old_logprobs"])]
    assert metrics["actor/cov/mean"] == pytest.approx(float(np.cov(*values, bias=True)[0, 1]), rel=1e-9)


def reference_loss(name: str, step: Step, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """The paper's losses over all tokens at once, a list of tokens each; every second candidate of clip_cov."""
    mask = step.batch.loss_mask
    old, adv, new = (values[mask] for values in (step.batch.quantities["old_logprobs"], advantages, logprobs))
    cov = ((old - old.mean()) * (adv - adv.mean())).tolist()
    ratio, losses = (new - old).exp(), []
    largest = sorted(range(len(cov)), key=lambda i: -cov[i])[: int(0.3 * len(cov))]
    for i, number in enumerate(cov):
        loss = -ratio[i] * adv[i]
        if name == "kl_cov":
            losses.append(loss + 0.7 * (new[i] - old[i]).abs() if i in largest else loss)
        else:
            clipped = torch.maximum(loss, -ratio[i].clamp(0.6, 1.5) * adv[i])
            losses.append(clipped * 0 if 0.05 < number < 0.9 else clipped)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("seed", range(5))
def test_losses_are_those_of_the_paper(name: str, seed: int) -> None:
    """With a share that takes every candidate of clip_cov, no random choice remains."""
    step = random_step([4, 4, 4], seed=seed)
    options = {
        "clip_cov": {"clip_low": 0.4, "clip_high": 0.5, "cov_share": 1.0, "cov_low": 0.05, "cov_high": 0.9},
        "kl_cov": {"cov_share": 0.3, "cov_kl_coef": 0.7},
    }[name]
    algo = algorithm(config(name, **options))
    problem, advantages = problem_of(algo, step)
    leaf, plain = (step.logprobs.clone().requires_grad_() for _ in range(2))
    rows = RowBatch(labels=step.batch.uids, loss_mask=problem.mask, quantities=problem.quantities)
    sums = algo.loss(rows, PolicyOutputs(logprobs=leaf, entropy=None), AlgoState())
    ours = sums.objective["loss"] / problem.mask.sum()
    expected = reference_loss(name, step, advantages.values, plain)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    grads = [torch.autograd.grad(loss, at)[0] for loss, at in ((ours, leaf), (expected, plain))]
    assert torch.allclose(grads[0], grads[1], rtol=1e-9, atol=1e-12)
    share = sums.metrics["policy_tokens"]["actor/cov_chosen"]
    assert share == advantages.quantities[CHOSEN].sum() > 0


def test_the_choice_needs_old_log_probs_and_reaches_the_loss() -> None:
    algo = algorithm(config("kl_cov"))
    assert "old_logprobs" in algo.requires()
    assert CHOSEN in algo.reads
    step = random_step([2, 2], seed=1)
    problem, _ = problem_of(algo, step)
    quantities = {name: value for name, value in problem.quantities.items() if name != CHOSEN}
    rows = RowBatch(labels=step.batch.uids, loss_mask=problem.mask, quantities=quantities)
    with pytest.raises(KeyError, match="chosen_by_covariance was not computed for this batch"):
        algo.loss(rows, PolicyOutputs(logprobs=step.logprobs, entropy=None), AlgoState())


def test_bounds_that_nothing_is_between_are_refused() -> None:
    cfg = config("clip_cov", cov_low=5.0, cov_high=1.0)
    with pytest.raises(ConfigError, match=r"cov_low and algo\.policy_loss\.cov_high: got 5\.0 and 1\.0, expected cov_"):
        build_algorithm(cfg, max_response_tokens=8)
    with pytest.raises(ConfigError, match=r"cov_high: got 9\.0, which is not read with algo\.policy_loss\.name=kl_cov"):
        build_algorithm(config("kl_cov", cov_high=9.0), max_response_tokens=8)
