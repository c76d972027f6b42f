"""Losses for samples that are stale, by hand: values, gradients, and what each is where policy and anchor agree."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos import build_algorithm
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.masked import kept
from megarl.algos.off_policy_losses import balanced_bounds, binary_kl, binary_tv
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.algos.shaping import ShapingInputs, estimate_log_z
from megarl.config.algo import AlgoConfig, CorrectionConfig, CpoConfig, PolicyLossConfig
from megarl.errors import ConfigError
from megarl.types import Advantages
from tests.helpers.examples import step

LN2 = math.log(2)
NAMES = ("dppo_tv", "dppo_kl", "drpo", "topr", "vespo", "ctpo", "ctpo_geomean", "bapo")


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def outcome(
    name: str, probs: list[float], anchors: list[float], advantages: list[float], *, weights: Any = None, **cfg: Any
) -> tuple[list[float], list[float]]:
    """The loss of the tokens of one row, and its gradient in their log-probs."""
    logprobs = double([probs]).log().requires_grad_()
    x = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=double([anchors]).log(),
        advantages=double([advantages]),
        loss_mask=torch.ones(1, len(probs), dtype=torch.bool),
        correction=None if weights is None else double([weights]),
        clip_bounds=torch.where(double([advantages]) < 0, 0.75, 1.5),
    )
    loss = policy_loss(x, PolicyLossConfig(name=name, **cfg)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss[0].tolist(), gradient[0].tolist()


def near(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_where_policy_and_anchor_agree_it_is_the_policy_gradient(name: str) -> None:
    advantages = [1.0, -2.0, 0.0, 0.5]
    probs = [0.5, 0.25, 0.9, 0.01]
    assert outcome(name, probs, probs, advantages)[1] == near([-1.0, 2.0, 0.0, -0.5])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_blocks_only_what_moves_on(name: str) -> None:
    """Probabilities move by 0.4, from 0.2 to 0.6 and back: a TV of 0.4, and KLs of 0.335 and 0.382 nats."""
    up, down = ([0.6] * 3, [0.2] * 3), ([0.2] * 3, [0.6] * 3)
    advantages = [1.0, -1.0, 0.0]
    assert outcome(name, *up, advantages)[1] == near([0.0, 3.0, 0.0])
    assert outcome(name, *down, advantages)[1] == near([-1 / 3, 0.0, 0.0])
    # Each bound on its own side.
    assert outcome(name, *up, advantages, clip_high=0.41, clip_low=0.01)[1] == near([-3.0, 3.0, 0.0])
    assert outcome(name, *down, advantages, clip_high=0.01, clip_low=0.41)[1] == near([-1 / 3, 1 / 3, 0.0])


def test_divergences_of_two_outcomes() -> None:
    p, q = double([0.6, 0.2, 1.0, 0.5, 0.5, 1e-30]), double([0.2, 0.6, 0.5, 1.0, 0.5, 1e-30])
    assert binary_tv(p.log(), q.log()).tolist() == near([0.4, 0.4, 0.5, 0.5, 0.0, 0.0])
    # A probability of 1 is one of 1 − 2^-53.
    rare = 0.5 * math.log(0.5) + 0.5 * math.log(0.5 * 2**53)
    expected = [0.2 * math.log(1 / 3) + 0.8 * math.log(2), 0.6 * math.log(3) + 0.4 * math.log(0.5), rare, LN2, 0, 0]
    assert binary_kl(p.log(), q.log()).tolist() == near(expected)


def test_drpo_pulls_by_the_change_of_the_probability() -> None:
    """w = 1 − sign(A(r − 1))·|p − q|/δ; |p − q| = 0.4, r = 3."""
    values, gradient = outcome("drpo", [0.6, 0.6], [0.2, 0.2], [1.0, -1.0], drpo_delta=0.5)
    # |A|·q·(r − 1)²/(2δ) = 0.2·4/1.
    assert values == near([-3 + 0.8, 3 + 0.8])
    assert gradient == near([-3 * (1 - 0.4 / 0.5), 3 * (1 + 0.4 / 0.5)])
    with pytest.warns(UserWarning, match="bounds no change"):
        build_algorithm(AlgoConfig(policy_loss=PolicyLossConfig(name="drpo")), max_response_tokens=8)


def test_topr_bounds_the_ratio_of_a_row_where_it_fails() -> None:
    # Ratios ½ and 1/4: the row's is 1/8. Where the row's is above 1, the weight is 1.
    assert outcome("topr", [0.25, 0.125], [0.5, 0.5], [-1.0, -1.0])[1] == near([0.125, 0.125])
    assert outcome("topr", [0.25, 0.125], [0.5, 0.5], [1.0, 1.0])[1] == near([-1.0, -1.0])
    assert outcome("topr", [0.5, 0.5], [0.25, 0.25], [-1.0, -1.0])[1] == near([1.0, 1.0])
    assert outcome("topr", [1e-30], [1.0], [-1.0])[1] == near([math.exp(-20)])


def test_flowrl_is_the_policy_gradient_of_centred_differences_at_the_start_of_a_step() -> None:
    """β = 2, a row of two tokens and one of one, no KL at first: ln Z = mean of 2·(1, −½) = ½, so that Δ = (−1½, 1½).

    The gradient of the mean over rows of Δ² by a log-prob is 2·Δ / (rows · tokens). A longer row of another group, and
    one without loss tokens, change nothing.
    """
    cfg = AlgoConfig(policy_loss=PolicyLossConfig(name="flowrl", flowrl_beta=2.0), aggregation="seq-mean-token-mean")
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    advantages = kept(torch.tensor([1.0, -0.5, 0.0, 9.0], dtype=torch.float64)[:, None].expand(4, 2), mask)
    logprobs = kept(torch.full((4, 2), -1.0, dtype=torch.float64), mask)
    same = {name: logprobs.tolist() for name in ("old_logprobs", "ref_logprobs")}
    batch = step("aaba", [1.0] * 4, mask.tolist(), **same)
    x = ShapingInputs(batch=batch, scored_rewards=batch.rewards, cfg=cfg, vocab_size=None)
    shaped = estimate_log_z(advantages, x)
    assert shaped.metrics["actor/log_z"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    current = logprobs.clone().requires_grad_()
    inputs = PolicyLossInputs(
        logprobs=current,
        old_logprobs=logprobs,
        advantages=advantages,
        loss_mask=mask,
        ref_logprobs=logprobs,
        log_z=shaped.quantities["log_z"],
    )
    loss = AGGREGATIONS.get(cfg.aggregation).local_sum(policy_loss(inputs, cfg.policy_loss).loss, mask) / 3
    (gradient,) = torch.autograd.grad(loss, current)
    assert gradient.tolist() == [[-0.5, -0.5], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_vespo_weighs_the_row_with_the_correction_in_it() -> None:
    # w = 2·½·¼·2 = ½.
    weights, probs, anchors = [0.25, 2.0], [0.5, 0.25], [0.25, 0.5]
    for advantage, k, rate in ((1.0, 2, 3), (-1.0, 3, 2)):
        expected = 0.5**k * math.exp(rate * 0.5)
        gradient = outcome("vespo", probs, anchors, [advantage] * 2, weights=weights)[1]
        assert gradient == near([-advantage * expected] * 2)


def test_ctpo_bounds_the_ratio_of_the_row_so_far() -> None:
    # Ratios 2, 2, 1/8: cumulative ones 2, 4, ½; their geometric means 2, 2, ½^(1/3).
    probs, anchors = [0.5, 0.5, 0.0625], [0.25, 0.25, 0.5]
    cfg: dict[str, Any] = {"clip_low": 0.25, "clip_high": 1.0, "ctpo_dual": 0.5}
    # A > 0: e^{1·1} = 2.7 is above 2, and e^{√2} = 4.1 above 4.
    assert outcome("ctpo", probs, anchors, [1.0] * 3, **cfg)[0] == near([-2.0, -4.0, -0.5])
    # A < 0: bounded by e^{0.5·√t} where above, by e^{−0.25·√t} where below.
    expected = [math.exp(0.5), math.exp(0.5 * math.sqrt(2)), math.exp(-0.25 * math.sqrt(3))]
    assert outcome("ctpo", probs, anchors, [-1.0] * 3, **cfg) == (near(expected), [0.0, 0.0, 0.0])
    # A gradient through the own token alone.
    assert outcome("ctpo", probs, anchors, [0.0, 0.0, 1.0], **cfg)[1] == near([0.0, 0.0, -0.5])
    mean = [-2.0, -math.exp(math.sqrt(0.5)), -(0.5 ** (1 / 3))]
    assert outcome("ctpo_geomean", probs, anchors, [1.0] * 3, **cfg)[0] == near([-2.0, -2.0, mean[2]])
    cfg["clip_high"] = 0.75
    tighter = [-2.0, -math.exp(0.75 / math.sqrt(2)), mean[2]]
    assert outcome("ctpo_geomean", probs, anchors, [1.0] * 3, **cfg)[0] == near(tighter)


def test_ctpo_is_capped_from_above_only() -> None:
    cfg: dict[str, Any] = {"clip_high": 11.0, "clip_low": 0.025, "ctpo_dual": 0.05}
    assert outcome("ctpo", [1.0], [1e-5], [1.0], **cfg) == (near([-math.exp(10)]), [0.0])
    assert outcome("ctpo", [1e-8], [1.0], [1.0], **cfg)[0] == near([-1e-8])


def test_bapo_bounds_are_those_that_balance_what_trains() -> None:
    cfg = PolicyLossConfig(name="bapo")

    def bounds(ratios: list[float], advantages: list[float]) -> tuple[float, float]:
        return balanced_bounds(double(ratios), double(advantages), cfg)

    assert bounds([1.0, 1.0], [1.0, -0.5]) == (0.6, 1.2)
    # Raised until the ratio of 0.67 has no gradient: 1·1 ≥ 1·0.9.
    assert bounds([1.0, 1.0, 0.67], [1.0, -0.9, -1.0]) == pytest.approx((0.7, 1.2))
    # Then the upper one, until 1.42 has one.
    assert bounds([1.0, 1.0, 1.42], [1.0, -2.0, 1.0]) == pytest.approx((0.8, 1.45))
    assert bounds([1.0, 1.0], [1.0, -2.0]) == pytest.approx((0.8, 2.0))
    assert bounds([], []) == bounds([1.0], [1.0]) == (0.6, 1.2)


def test_bapo_clips_at_the_bound_of_each_sign() -> None:
    values, gradient = outcome("bapo", [0.8, 0.2, 0.2, 0.8], [0.4, 0.4, 0.4, 0.2], [1.0, 1.0, -1.0, -1.0])
    assert values == near([-1.5, -0.5, 0.75, 3.0])
    assert gradient == near([0.0, -0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (AlgoConfig(policy_loss=PolicyLossConfig(name="bapo")), "set algo.correction.name=rollout_ratio"),
        (
            AlgoConfig(policy_loss=PolicyLossConfig(name="vespo"), correction=CorrectionConfig(name="sequence")),
            "as often as it has tokens",
        ),
        (AlgoConfig(step_scale_ess=0.5), "algo.step_scale_ess: got 0.5, which is not read"),
        (
            AlgoConfig(high_entropy_share=0.2, cpo=CpoConfig(method="seq_kl", entropy_source="current")),
            "algo.high_entropy_share: got 0.2 with algo.cpo.entropy_source=current",
        ),
        (
            AlgoConfig(policy_loss=PolicyLossConfig(name="gspo", clip_high=4e-4), aggregation="token-mean"),
            "seq-mean-token-sum as LUSPO does",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(cfg: AlgoConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(cfg, max_response_tokens=8)


# --- statistics of optimizer batches


@pytest.mark.parametrize(
    "cfg",
    [
        AlgoConfig(policy_loss=PolicyLossConfig(name="bapo"), correction=CorrectionConfig(name="rollout_ratio")),
        AlgoConfig(correction=CorrectionConfig(name="m2po", max_second_moment=0.2)),
    ],
)
def test_statistics_are_those_of_each_optimizer_batch(cfg: AlgoConfig) -> None:
    """A step of two optimizer batches is as two steps of one each, and not as one of both."""
    near = {"old_logprobs": [[-1.0, -1.0], [-1.0, -1.0]], "rollout_logprobs": [[-1.1, -1.4], [-0.9, -1.0]]}
    far = {"old_logprobs": [[-1.0, -1.0], [-1.0, -1.0]], "rollout_logprobs": [[-1.6, -0.3], [-0.5, -0.6]]}
    both = {name: near[name] + far[name] for name in near}

    def shaped(uids: str, rewards: list[float], given: dict[str, list[list[float]]], prompts: int | None) -> Advantages:
        algorithm = build_algorithm(cfg, max_response_tokens=8, mini_batch_prompts=prompts)
        return algorithm.advantages(step(uids, rewards, **given), algorithm.initial_state())

    name = "clip_bounds" if cfg.policy_loss.name == "bapo" else "correction"
    parts = [shaped("aa", [1.0, 0.0], near, None), shaped("bb", [0.0, 1.0], far, None)]
    expected = torch.cat([part.quantities[name] for part in parts])
    rewards = [1.0, 0.0, 0.0, 1.0]
    assert torch.equal(shaped("aabb", rewards, both, 1).quantities[name], expected)
    assert not torch.equal(shaped("aabb", rewards, both, None).quantities[name], expected)


# --- beside public code


def verl_dppo(name: str, lp: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The losses `dppo_tv` and `dppo_kl` of verl/trainer/ppo/core_algos.py (github.com/verl-project/verl, 2026-02), in
    its terms, with the truncation at 20 that it means.

    It masks by the change of the probability, without looking at the ratio, and takes −A·sg(min(r, 20))·lp.
    """
    p, q, ratio = lp.exp(), old.exp(), (lp - old).clamp(-20.0, 20.0).exp().clamp(max=20.0).detach()
    if name == "dppo_tv":
        rises, falls = p - q <= high, p - q >= -low
    else:
        kl = q * (old - lp) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        rises, falls = (kl <= high) | (p <= q), (kl <= low) | (p >= q)
    return -advantages * ratio * lp * torch.where(advantages > 0, rises, falls).detach()


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_has_the_gradient_of_verl(name: str) -> None:
    """Up to its truncation, and 1e-8 in its logarithms."""
    g = torch.Generator().manual_seed(5)
    old = torch.rand(1, 4000, generator=g, dtype=torch.float64).clamp(1e-3, 0.999).log()
    moved = (old + 0.7 * torch.randn(old.shape, generator=g, dtype=torch.float64)).clamp(max=-1e-3)
    advantages = torch.randn(old.shape, generator=g, dtype=torch.float64)
    cfg = PolicyLossConfig(name=name, clip_low=0.05, clip_high=0.1)
    x = PolicyLossInputs(
        logprobs=moved.requires_grad_(),
        old_logprobs=old,
        advantages=advantages,
        loss_mask=torch.ones_like(old, dtype=torch.bool),
    )
    assert float((moved - old).detach().exp().max()) < 20
    (ours,) = torch.autograd.grad(policy_loss(x, cfg).loss.sum(), moved)
    (theirs,) = torch.autograd.grad(verl_dppo(name, moved, old, advantages, 0.05, 0.1).sum(), moved)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert 200 < int((ours == 0).sum()) < 2000


def trl_loss(name: str, lp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """`vespo` and `luspo` of TRL's GRPOTrainer, as Liger-Kernel's `ppo_loss_fn` has them (v0.8.2), in their terms: a
    sum over tokens, and over rows of a row's loss times its number of tokens."""
    ratio = (lp - old) * mask
    if name == "luspo":
        coef = (ratio.sum(-1) / mask.sum(-1).clamp(min=1)).exp()
        return -(torch.min(coef * advantage, coef.clamp(1 - 3e-4, 1 + 4e-4) * advantage) * mask.sum(-1)).sum()
    log_w = ratio.detach().clamp(-20.0, 20.0).sum(-1).clamp(math.log(1e-8), 20.0)
    k, rate = torch.where(advantage >= 0, 2.0, 3.0), torch.where(advantage >= 0, 3.0, 2.0)
    phi = (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return -((phi * advantage)[:, None] * lp * mask).sum()


@pytest.mark.parametrize(
    ("name", "cfg"),
    [
        ("vespo", PolicyLossConfig(name="vespo")),
        ("luspo", PolicyLossConfig(name="gspo", clip_low=3e-4, clip_high=4e-4)),
    ],
)
def test_rows_weigh_as_in_trl(name: str, cfg: PolicyLossConfig) -> None:
    """Above its lower bound of a row's weight, 1e-8."""
    g = torch.Generator().manual_seed(6)
    old = -torch.rand(500, 6, generator=g, dtype=torch.float64) - 0.1
    moved = (old + 0.5 * torch.randn(old.shape, generator=g, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(len(old), generator=g, dtype=torch.float64)
    mask = torch.rand(old.shape, generator=g) < 0.8
    x = PolicyLossInputs(
        logprobs=moved, old_logprobs=old, advantages=advantage[:, None].expand(old.shape), loss_mask=mask
    )
    loss = AGGREGATIONS.get("seq-mean-token-sum").local_sum(policy_loss(x, cfg).loss, mask)
    (ours,) = torch.autograd.grad(loss, moved)
    (theirs,) = torch.autograd.grad(trl_loss(name, moved, old, advantage, mask), moved)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-15)
    assert int((ours != 0).any(-1).sum()) > 100
