"""Losses for samples that are stale, by hand: values, gradients, and what each is where policy and anchor agree."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos import build_algorithm
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.config.algo import AlgoConfig, CorrectionConfig, CpoConfig, PolicyLossConfig
from megarl.errors import ConfigError

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


# --- beside public code
