import math
from dataclasses import fields
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


def test_dual_clip_off_leaves_large_ratios_of_negative_advantages() -> None:
    terms, diagnostics = run(row([3 * LN2 - 3]), [-3.0], [-1.0], dual_clip=None)
    assert terms.loss.item() == pytest.approx(8.0)
    assert diagnostics["actor/pg_clipfrac_lower"] == [0]


def test_asymmetric_clip_range() -> None:
    # Ratios 2 and 1/2: A > 0 stops at 1 + 0.5, A < 0 at 1 − 0.1.
    terms, _ = run(row([LN2 - 1, -LN2 - 1]), [-1.0, -1.0], [1.0, -1.0], clip_low=0.1, clip_high=0.5)
    assert terms.loss[0].tolist() == pytest.approx([-1.5, 0.9])


def test_log_ratio_is_bounded_at_20() -> None:
    logprobs = row([0.0])
    terms, _ = run(logprobs, [-1000.0], [-1.0], dual_clip=None)
    assert terms.loss.item() == pytest.approx(math.exp(20))
    terms.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_no_gradient_into_old_logprobs_or_advantages() -> None:
    leaves = [torch.full((1, 2), -1.0, requires_grad=True) for _ in range(3)]
    inputs = PolicyLossInputs(
        logprobs=leaves[0],
        old_logprobs=leaves[1],
        advantages=leaves[2].detach(),
        loss_mask=torch.ones(1, 2, dtype=torch.bool),
    )
    ppo_clip(inputs, PolicyLossConfig()).loss.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_nan_is_not_hidden(advantage: float) -> None:
    terms, diagnostics = run(row([math.nan]), [-1.0], [advantage])
    assert terms.loss.isnan().all()
    assert math.isnan(diagnostics["actor/ppo_kl"][0])


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


def test_gspo_gradient_is_shared_by_the_tokens_of_a_row() -> None:
    # Log-ratios ln 2 and 0: s = √2; inside a clip range of 1, dl/dlogprob_t = −s·A / 2 summed over both tokens.
    logprobs = row([LN2 - 1, -1.0])
    inputs = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-1.0, -1.0]], dtype=torch.float64),
        advantages=torch.ones(1, 2, dtype=torch.float64),
        loss_mask=torch.ones(1, 2, dtype=torch.bool),
    )
    gspo(inputs, PolicyLossConfig(name="gspo", clip_low=0.9, clip_high=1.0)).loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-math.sqrt(2), -math.sqrt(2)])


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


def test_reinforce_has_the_gradient_of_ratio_1() -> None:
    logprobs, advantages = [-1.0, -0.5, -2.0], [1.0, -2.0, 0.5]
    x = loss_inputs(row(logprobs), [-3.0, -0.1, -2.0], advantages)
    terms = policy_loss(x, PolicyLossConfig(name="reinforce"))
    assert terms.loss[0].tolist() == pytest.approx([1.0, -1.0, 1.0])
    assert terms.diagnostics["actor/ppo_kl"][0].tolist() == pytest.approx([-2.0, 0.4, 0.0])
    assert gradient("reinforce", logprobs, [-3.0, -0.1, -2.0], advantages) == [-1.0, 2.0, -0.5]
    assert gradient("ppo_clip", logprobs, logprobs, advantages) == [-1.0, 2.0, -0.5]


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


def test_gspo_token_is_gspo_where_the_advantages_of_a_row_are_equal() -> None:
    # Mean log-ratio (ln 2 + 0 − 0.2) / 3, inside the clip range.
    logprobs, old = [LN2 - 1, -1.0, -1.2], [-1.0, -1.0, -1.0]
    cfg: dict[str, Any] = {"clip_low": 0.5, "clip_high": 0.5}
    values = [
        policy_loss(loss_inputs(row(logprobs), old, [1.5] * 3), PolicyLossConfig(name=name, **cfg)).loss[0].tolist()
        for name in ("gspo", "gspo_token")
    ]
    assert values[0] == pytest.approx(values[1])
    row_ratio = math.exp((LN2 - 0.2) / 3)
    for name in ("gspo", "gspo_token"):
        assert gradient(name, logprobs, old, [1.5] * 3, **cfg) == pytest.approx([-1.5 * row_ratio] * 3)
    # Different advantages: gspo spreads their mean, gspo_token keeps each where it is.
    advantages = [3.0, 0.0, -1.5]
    assert gradient("gspo", logprobs, old, advantages, **cfg) == pytest.approx([-0.5 * row_ratio] * 3)
    assert gradient("gspo_token", logprobs, old, advantages, **cfg) == pytest.approx(
        [-a * row_ratio for a in advantages]
    )


# Log-ratios to old log-probs of −1, and the advantage of each token: two rows and one with both signs.
LOG_RATIOS = ([LN2, -0.6, 0.2], [0.6, -0.9, 0.1], [0.5, -0.7, 0.3])
ROW_ADVANTAGES = ([1.0] * 3, [-1.0] * 3, [1.5, -2.0, -0.5])
every_row = pytest.mark.parametrize(("log_ratios", "advantages"), list(zip(LOG_RATIOS, ROW_ADVANTAGES, strict=True)))


def test_gmpo_clips_tokens_before_their_geometric_mean() -> None:
    cfg: dict[str, Any] = {"clip_low": 0.4, "clip_high": 0.4}
    # A > 0: ln 2 becomes 0.4, and −0.6 stays. The mean of 0.4, −0.6 and 0.2 is 0, so s = 1.
    # A < 0: −0.9 becomes −0.4, and 0.6 stays. The mean of 0.6, −0.4 and 0.1 is 0.1.
    for log_ratios, sign, s, clipped in (
        (LOG_RATIOS[0], 1, 1.0, [1, 0, 0]),
        (LOG_RATIOS[1], -1, 1.105170918, [0, 1, 0]),
    ):
        logprobs, old, advantages = [d - 1 for d in log_ratios], [-1.0] * 3, [float(sign)] * 3
        terms = policy_loss(loss_inputs(row(logprobs), old, advantages), PolicyLossConfig(name="gmpo", **cfg))
        assert terms.loss[0].tolist() == pytest.approx([-sign * s] * 3)
        assert terms.diagnostics["actor/pg_clipfrac"][0].tolist() == clipped
        assert terms.diagnostics["actor/ppo_kl"][0].tolist() == pytest.approx([-d for d in log_ratios])
        # Each of the three equal losses gives −s·A / 3 to each token that is not clipped.
        expected = [0.0 if cut else -sign * s for cut in clipped]
        assert gradient("gmpo", logprobs, old, advantages, **cfg) == pytest.approx(expected)


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


def test_gmpo_ignores_tokens_outside_the_mask() -> None:
    """The mean of 0.2 and 0.4, whatever stands between them."""
    x = PolicyLossInputs(
        logprobs=torch.tensor([[-0.8, math.nan, -0.6]]),
        old_logprobs=torch.tensor([[-1.0, 0.0, -1.0]]),
        advantages=torch.tensor([[2.0, 0.0, 2.0]]),
        loss_mask=torch.tensor([[True, False, True]]),
    )
    loss = policy_loss(x, PolicyLossConfig(name="gmpo", clip_low=0.5, clip_high=0.5)).loss
    assert loss[0, [0, 2]].tolist() == pytest.approx([-2 * math.exp(0.3)] * 2)


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


@every_row
def test_sapo_weighs_gradients_as_in_the_paper(log_ratios: list[float], advantages: list[float]) -> None:
    """The paper's other form: the gradient is that of r·A times sech²(τ/2·(r − 1))."""
    taus = [1.3 if a > 0 else 1.7 for a in advantages]
    expected = [
        -a * math.exp(d) / math.cosh(tau / 2 * (math.exp(d) - 1)) ** 2
        for d, a, tau in zip(log_ratios, advantages, taus, strict=True)
    ]
    logprobs = [d - 1 for d in log_ratios]
    got = gradient("sapo", logprobs, [-1.0] * 3, advantages, tau_pos=1.3, tau_neg=1.7)
    assert got == pytest.approx(expected, rel=1e-12)


def test_clip_cov_has_no_loss_on_the_chosen_token() -> None:
    # Ratios 2, 2 and 1/2 with clip range [0.7, 1.5]; the second token is chosen.
    logprobs, old, advantages = [LN2 - 1, LN2 - 1, -LN2 - 1], [-1.0] * 3, [1.0, -1.0, 1.0]
    cfg: dict[str, Any] = {"clip_low": 0.3, "clip_high": 0.5}
    terms = policy_loss(loss_inputs(row(logprobs), old, advantages), PolicyLossConfig(name="clip_cov", **cfg))
    assert terms.loss[0].tolist() == pytest.approx([-1.5, 0.0, -0.5])
    assert terms.diagnostics["actor/pg_clipfrac"][0].tolist() == [1, 0, 0]
    assert terms.diagnostics["actor/cov_chosen"][0].tolist() == [0, 1, 0]
    # Without a choice the second token would have 2.
    assert gradient("clip_cov", logprobs, old, advantages, **cfg) == pytest.approx([0.0, 0.0, -0.5])


def test_kl_cov_adds_a_penalty_on_the_chosen_token() -> None:
    # Ratios 4, 2 and 1/2, none clipped; the second token has 2 + 0.5·ln 2, with the gradient 2 + 0.5.
    logprobs, old, advantages = [2 * LN2 - 1, LN2 - 1, -LN2 - 1], [-1.0] * 3, [1.0, -1.0, 1.0]
    x = loss_inputs(row(logprobs), old, advantages)
    terms = policy_loss(x, PolicyLossConfig(name="kl_cov", cov_kl_coef=0.5))
    assert terms.loss[0].tolist() == pytest.approx([-4.0, 2.3465735903, -0.5])
    assert terms.diagnostics["actor/cov_chosen"][0].tolist() == [0, 1, 0]
    assert terms.diagnostics["actor/ppo_kl"][0].tolist() == pytest.approx([-2 * LN2, -LN2, LN2])
    assert gradient("kl_cov", logprobs, old, advantages, cov_kl_coef=0.5) == pytest.approx([-4.0, 2.5, -0.5])


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


def test_inputs_are_not_mutated_and_float32_stays() -> None:
    for name in POLICY_LOSSES:
        x = PolicyLossInputs(
            logprobs=torch.tensor([[-0.9, -1.5]]),
            old_logprobs=torch.tensor([[-1.0, -1.0]]),
            advantages=torch.tensor([[1.0, -1.0]]),
            loss_mask=torch.tensor([[True, False]]),
            correction=torch.tensor([[2.0, 0.0]]),
            chosen=torch.tensor([[True, False]]),
            clip_bounds=torch.tensor([[1.2, 0.8]]),
            rollout_logprobs=torch.tensor([[-1.0, -1.0]]),
            beside=torch.tensor([[0.5, 1.0]]),
            ref_logprobs=torch.tensor([[-1.0, -1.0]]),
            log_z=torch.tensor([[1.0, 0.0]]),
        )
        copy = copy_of(x)
        terms = policy_loss(x, PolicyLossConfig(name=name))
        assert terms.loss.dtype == torch.float32
        assert all(value.dtype == torch.float32 for value in terms.diagnostics.values())
        for field in fields(x):
            value = getattr(x, field.name)
            assert value is getattr(copy, field.name) is None or torch.equal(value, getattr(copy, field.name))


def copy_of(x: PolicyLossInputs) -> PolicyLossInputs:
    values = {field.name: getattr(x, field.name) for field in fields(x)}
    return PolicyLossInputs(**{name: None if value is None else value.clone() for name, value in values.items()})


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_kl_of_a_token_is_not_clamped(name: str) -> None:
    logprobs = row([-31.0, -1.0])
    x = PolicyLossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-1.0, -1.0]], dtype=torch.float64),
        advantages=torch.tensor([[1.0, 1.0]], dtype=torch.float64),
        loss_mask=torch.tensor([[True, True]]),
        chosen=torch.tensor([[True, False]]),
        clip_bounds=torch.ones(1, 2, dtype=torch.float64),
        rollout_logprobs=torch.tensor([[-1.0, -1.0]], dtype=torch.float64),
        beside=0.5 * logprobs,
        ref_logprobs=torch.tensor([[-1.0, -1.0]], dtype=torch.float64),
        log_z=torch.ones(1, 2, dtype=torch.float64),
    )
    terms = policy_loss(x, PolicyLossConfig(name=name, cov_kl_coef=0.5))
    assert terms.diagnostics["actor/ppo_kl"].tolist() == [[30.0, 0.0]]
    if name == "kl_cov":
        # −r·A + 0.5·|−30|; r is 2e-9, and its exponent is bounded, so that only the penalty has a gradient.
        assert terms.loss[0, 0].item() == pytest.approx(15.0)
        terms.loss[0, 0].backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [[-0.5, 0.0]]
