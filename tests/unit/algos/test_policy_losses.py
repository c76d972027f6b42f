import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossTerms,
    gspo,
    policy_loss,
    ppo_clip,
)
from megarl.config.algo import PolicyLossConfig

LN2 = math.log(2)


def run(
    logprobs: Tensor, old: list[float], advantages: list[float], **cfg: Any
) -> tuple[PolicyLossTerms, dict[str, list[float]]]:
    """The loss on one row, and its diagnostics as lists."""
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([old], dtype=torch.float64),
        advantages=torch.tensor([advantages], dtype=torch.float64),
        loss_mask=torch.ones(1, len(old), dtype=torch.bool),
    )
    terms = ppo_clip(inputs, PolicyLossConfig(**cfg))
    return terms, {name: value.flatten().tolist() for name, value in terms.diagnostics.items()}


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("case_id", ["C.ppo_loss", "C.ppo_dualclip"])
def test_golden(case_id: str, golden: Any, check_golden: Any) -> None:
    case = golden(case_id)
    params, inputs = case["params"], case["inputs"]
    terms, _ = run(
        row(inputs["logp"]),
        inputs["old"],
        inputs["adv"],
        clip_low=params["eps_low"],
        clip_high=params["eps_high"],
        dual_clip=params["clip_c"],
    )
    check_golden(terms.loss[0], case["expected"]["loss"], case)


def test_gradient_and_diagnostics_token_by_token() -> None:
    # Ratios 2, 1/2, 1, 8, 1/2 with clip range [0.8, 1.2] and dual clip 3:
    #   A = 1, r = 2: clipped at 1.2, no gradient.   A = 1, r = 1/2: unclipped, gradient −r·A.
    #   A = −2, r = 1: unclipped.                    A = −1, r = 8: dual clip at 3, no gradient.
    #   A = −1, r = 1/2: clipped at 0.8, no gradient.
    logprobs = row([LN2 - 1, -LN2 - 1, -1.0, 3 * LN2 - 3, -LN2 - 1])
    terms, diagnostics = run(logprobs, [-1.0, -1.0, -1.0, -3.0, -1.0], [1.0, 1.0, -2.0, -1.0, -1.0])
    assert terms.loss[0].tolist() == pytest.approx([-1.2, -0.5, 2.0, 3.0, 0.8])
    terms.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -0.5, 2.0, 0.0, 0.0])
    assert diagnostics["actor/pg_clipfrac"] == [1, 0, 0, 0, 1]
    assert diagnostics["actor/pg_clipfrac_lower"] == [0, 0, 0, 1, 0]
    assert diagnostics["actor/ppo_kl"] == pytest.approx([-LN2, LN2, 0.0, -3 * LN2, LN2])
    assert not any(value.requires_grad for value in terms.diagnostics.values())


def test_gspo_golden(golden: Any, check_golden: Any) -> None:
    case = golden("D.gspo.rollout_False")
    inputs, params = case["inputs"], case["params"]
    mask = torch.tensor(inputs["mask"]).bool()
    terms = gspo(
        PolicyLossInputs(
            logprobs=torch.tensor(inputs["logp"], dtype=torch.float64),
            old_logprobs=torch.tensor(inputs["old_logp"], dtype=torch.float64),
            advantages=torch.tensor(inputs["adv"], dtype=torch.float64),
            loss_mask=mask,
        ),
        PolicyLossConfig(name="gspo", clip_low=params["eps_low"], clip_high=params["eps_high"]),
    )
    # Mean over rows of the row's token mean.
    loss = (torch.where(mask, terms.loss, 0.0).sum(1) / mask.sum(1)).mean()
    check_golden(loss, case["expected"]["loss"], case)
    assert terms.diagnostics["actor/pg_clipfrac"].sum() == 0


def loss_inputs(logprobs: Tensor, old: list[float], advantages: list[float], **more: Any) -> PolicyLossInputs:
    return PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([old], dtype=torch.float64),
        advantages=torch.tensor([advantages], dtype=torch.float64),
        loss_mask=torch.ones(1, len(old), dtype=torch.bool),
        rollout_logprobs=torch.tensor([old], dtype=torch.float64),
        beside=0.5 * logprobs,
        ref_logprobs=torch.tensor([old], dtype=torch.float64),
        log_z=torch.ones(1, len(old), dtype=torch.float64),
        **{"chosen": torch.arange(len(old))[None] == 1, "clip_bounds": torch.ones(1, len(old)).double(), **more},
    )


def gradient(name: str, logprobs: list[float], old: list[float], advantages: list[float], **cfg: Any) -> list[float]:
    leaf = row(logprobs)
    policy_loss(loss_inputs(leaf, old, advantages), PolicyLossConfig(name=name, **cfg)).loss.sum().backward()
    assert leaf.grad is not None
    return leaf.grad[0].tolist()


def test_cispo_weighs_the_log_prob_with_a_clipped_constant_ratio() -> None:
    # Ratios 2, 1/2, 1 and 1.1 with clip range [0.8, 1.2].
    logprobs = [LN2 - 1, -LN2 - 1, -1.0, math.log(1.1) - 1]
    old, advantages = [-1.0] * 4, [1.0, -2.0, 3.0, -1.0]
    terms = policy_loss(loss_inputs(row(logprobs), old, advantages), PolicyLossConfig(name="cispo"))
    weights = [1.2, 0.8, 1.0, 1.1]
    expected = [-w * a * lp for w, a, lp in zip(weights, advantages, logprobs, strict=True)]
    assert terms.loss[0].tolist() == pytest.approx(expected)
    assert terms.diagnostics["actor/pg_clipfrac"][0].tolist() == [1, 1, 0, 0]
    # Clipped tokens keep a gradient, unlike in ppo_clip.
    assert gradient("cispo", logprobs, old, advantages) == pytest.approx([-1.2, 1.6, -3.0, 1.1])


# Log-ratios to old log-probs of −1, and the advantage of each token: two rows and one with both signs.
LOG_RATIOS = ([LN2, -0.6, 0.2], [0.6, -0.9, 0.1], [0.5, -0.7, 0.3])
ROW_ADVANTAGES = ([1.0] * 3, [-1.0] * 3, [1.5, -2.0, -0.5])
every_row = pytest.mark.parametrize(("log_ratios", "advantages"), list(zip(LOG_RATIOS, ROW_ADVANTAGES, strict=True)))


@every_row
def test_gmpo_is_the_geometric_mean_of_the_paper(log_ratios: list[float], advantages: list[float]) -> None:
    """The root of a product of ratios, each cut on the side where its advantage would push it further."""
    low, high = math.exp(-0.3), math.exp(0.5)
    ratios = [torch.tensor(d, dtype=torch.float64).exp().requires_grad_() for d in log_ratios]
    cut = [r.clamp(max=high) if a > 0 else r.clamp(min=low) for r, a in zip(ratios, advantages, strict=True)]
    root = (cut[0] * cut[1] * cut[2]) ** (1 / 3)
    loss = -sum(advantages) * root
    logprobs = row([d - 1 for d in log_ratios])
    x = loss_inputs(logprobs, [-1.0] * 3, advantages)
    ours = policy_loss(x, PolicyLossConfig(name="gmpo", clip_low=0.3, clip_high=0.5)).loss.sum()
    assert ours.item() == pytest.approx(loss.item(), rel=1e-12)
    # d ratio / d logprob = ratio.
    expected = [(g * r).item() for g, r in zip(torch.autograd.grad(loss, ratios), ratios, strict=True)]
    assert torch.autograd.grad(ours, logprobs)[0][0].tolist() == pytest.approx(expected, rel=1e-12)


def test_sapo_gates_ratios_by_the_sign_of_the_advantage() -> None:
    # Ratios 1, 2 and 1/2; σ(0) = 0.5, σ(1) = 0.7310585786, σ(−1) = 0.2689414214.
    #   A = 1, τ = 1: −4·0.5 = −2, and −4·0.7310585786 = −2.9242343145.   A = −2, τ = 2: 2·2·0.2689414214.
    # With dr/dlp = r and σ' = σ·(1 − σ), the gradient is −A·r·4·σ': −1·1·1, −1·2·0.7864477329, 2·0.5·0.7864477329.
    logprobs, old, advantages = [-1.0, LN2 - 1, -LN2 - 1], [-1.0] * 3, [1.0, 1.0, -2.0]
    cfg: dict[str, Any] = {"tau_pos": 1.0, "tau_neg": 2.0}
    terms = policy_loss(loss_inputs(row(logprobs), old, advantages), PolicyLossConfig(name="sapo", **cfg))
    assert terms.loss[0].tolist() == pytest.approx([-2.0, -2.9242343145, 1.0757656855])
    assert terms.diagnostics["actor/ppo_kl"][0].tolist() == pytest.approx([0.0, -LN2, LN2])
    expected = [-1.0, -1.5728954659, 0.7864477329]
    assert gradient("sapo", logprobs, old, advantages, **cfg) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["clip_cov", "gmpo", "kl_cov", "sapo"])
def test_far_from_the_old_policy_values_and_gradients_are_finite(name: str) -> None:
    for distance in (-1000.0, 1000.0):
        for advantage in (1.0, -1.0):
            leaf = row([0.0, -1.0])
            x = loss_inputs(leaf, [-distance, -1.0], [advantage] * 2)
            loss = policy_loss(x, PolicyLossConfig(name=name)).loss
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
            assert loss.isfinite().all()
            assert grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(name for name in POLICY_LOSSES if not POLICY_LOSSES.get(name).takes_weights))
def test_correction_weights_multiply_the_loss_and_its_gradient_only(name: str) -> None:
    logprobs, old, advantages = [-0.9, -1.0, -1.1], [-1.0, -1.0, -1.0], [1.0, 2.0, -1.0]
    weights = torch.tensor([[0.5, 0.0, 3.0]], dtype=torch.float64, requires_grad=True)
    cfg = PolicyLossConfig(name=name)
    plain = policy_loss(loss_inputs(row(logprobs), old, advantages), cfg)
    leaf = row(logprobs)
    corrected = policy_loss(loss_inputs(leaf, old, advantages, correction=weights), cfg)
    assert torch.equal(corrected.loss, plain.loss * weights.detach())
    for diagnostic, value in plain.diagnostics.items():
        assert torch.equal(corrected.diagnostics[diagnostic], value)
    corrected.loss.sum().backward()
    assert weights.grad is None
    assert leaf.grad is not None
