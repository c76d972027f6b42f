"""Tokens chosen by the covariance of log-prob and advantage, and the losses that treat these in another way."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megarl.algos.build import build_algorithm
from megarl.algos.covariance import CHOSEN, choose_tokens, token_covariance
from megarl.config.algo import AlgoConfig, PolicyLossConfig
from megarl.types import Algorithm, AlgoState, PolicyOutputs, RowBatch
from tests.helpers.objectives import append_padding
from tests.helpers.steps import MAX_RESPONSE_TOKENS, Step, problem_of, random_step

# Two rows of two tokens, and one outside the mask. The mean advantage is 0, the mean log-prob −3, so the tokens have
# 2·2 = 4 and 0·1 = 0, then −1·−1 = 1 and −1·−2 = 2.
MASK = torch.tensor([[True, True, False], [True, True, False]])
ADVANTAGES = torch.tensor([[2.0, 0.0, 0.0], [-1.0, -1.0, 0.0]], dtype=torch.float64)
LOGPROBS = torch.tensor([[-1.0, -2.0, 0.0], [-4.0, -5.0, math.nan]], dtype=torch.float64)


def chosen(cfg: PolicyLossConfig, seed: int = 0) -> list[tuple[int, int]]:
    """Row and index of the tokens chosen of the rows above."""
    covariance = token_covariance(ADVANTAGES, LOGPROBS, MASK)
    return [(r, t) for r, t in choose_tokens(covariance, MASK, cfg, uids="ab", seed=seed).nonzero().tolist()]


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
@pytest.mark.parametrize("seed", [0, 1])
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
