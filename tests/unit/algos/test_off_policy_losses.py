"""Losses for samples that are stale, by hand: values, gradients, and what each is where policy and anchor agree."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos import build_algorithm
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.masked import kept
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.algos.shaping import ShapingInputs, estimate_log_z
from megarl.config.algo import AlgoConfig, CorrectionConfig, CpoConfig, PolicyLossConfig
from megarl.errors import ConfigError
from megarl.types import Advantages
from tests.helpers.examples import step

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
