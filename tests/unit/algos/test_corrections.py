"""Corrections for the rollout engine's log-probs: weights, gates, vetoes, and what they leave of the gradient."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.corrections import CORRECTIONS, Correction, CorrectionInputs, compute_correction
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.algos.validate import check_correction
from megarl.config.algo import AlgoConfig, CorrectionConfig, PolicyLossConfig
from megarl.errors import ConfigError, NonFiniteError

LN2 = math.log(2)
NAMES = sorted(CORRECTIONS)

# Geometric means 2^(−2/3), 2^(3/2) and 1; of growing prefixes 2, 2^(−1/2), 2^(−2/3) | 8, 2^(3/2) | 4, 1, 1.
RATIOS = [[2.0, 0.25, 0.5], [8.0, 1.0], [4.0, 0.25, 1.0]]
ADVANTAGES = [1.0, -2.0, 0.5]
BOUNDS: dict[str, Any] = {"low": 0.4, "high": 2.5, "max_kl_nats": 0.4}


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs(ratios: list[list[float]], advantages: list[float], demonstration: Tensor | None = None) -> CorrectionInputs:
    """Rows with these ρ, right-padded; what lies outside the mask is NaN."""
    width = max(map(len, ratios))
    log_ratio = f64([[math.log(r) for r in row] + [math.nan] * (width - len(row)) for row in ratios])
    mask = ~log_ratio.isnan()
    return CorrectionInputs(
        old_logprobs=log_ratio - 3.0,
        rollout_logprobs=torch.where(mask, -3.0, math.nan).double(),
        advantages=torch.where(mask, f64(advantages)[:, None], math.nan),
        loss_mask=mask,
        demonstration_mask=torch.zeros_like(mask) if demonstration is None else demonstration,
    )


def correct(name: str, **cfg: Any) -> Correction:
    return compute_correction(inputs(RATIOS, ADVANTAGES), CorrectionConfig(name=name, **(BOUNDS | cfg)))


def near(tensor: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(tensor, f64(expected), rtol=1e-12, atol=1e-12)


def golden_loss(case: Any, cfg: CorrectionConfig) -> tuple[Correction, PolicyLossInputs]:
    """A golden case's correction, and the inputs of its policy loss."""
    data = {name: f64(value) for name, value in case["inputs"].items()}
    mask = data["mask"].bool()
    correction = compute_correction(
        CorrectionInputs(
            old_logprobs=data["old_logp"],
            rollout_logprobs=data["rollout_logp"],
            advantages=data["adv"],
            loss_mask=mask,
            demonstration_mask=torch.zeros_like(mask),
        ),
        cfg,
    )
    return correction, PolicyLossInputs(
        logprobs=data["logp"],
        old_logprobs=correction.old_logprobs,
        advantages=data["adv"],
        loss_mask=mask,
        correction=correction.weights,
    )


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis", "reinforce_pro"])
def test_golden(kind: str, golden: Any, check_golden: Any) -> None:
    case = golden(f"D.is.{kind}")
    cfg = CorrectionConfig(name=kind, low=case["params"]["low"], high=case["params"]["high"])
    correction, loss_inputs = golden_loss(case, cfg)
    check_golden(correction.weights, case["expected"]["weight"], case)
    eps = case["params"]["eps"]
    terms = policy_loss(loss_inputs, PolicyLossConfig(clip_low=eps, clip_high=eps, dual_clip=None))
    mask = loss_inputs.loss_mask
    # Rejected tokens stay in the denominator.
    check_golden(terms.loss[mask].sum() / mask.sum(), case["expected"]["loss_token_mean"], case)


WEIGHTS: dict[str, list[list[float]]] = {
    "none": [[1, 1, 1], [1, 1, 0], [1, 1, 1]],
    "rollout_ratio": [[1, 1, 1], [1, 1, 0], [1, 1, 1]],
    "tis": [[2, 0.4, 0.5], [2.5, 1, 0], [2.5, 0.4, 1]],
    "tis_upper": [[2, 0.25, 0.5], [2.5, 1, 0], [2.5, 0.25, 1]],
    "icepop": [[2, 0, 0.5], [0, 1, 0], [0, 0, 1]],
    # (ln ρ / ln 2)² = 1, 4, 1 | 9, 0 | 4, 4, 0: the mean of the three smallest is (ln 2)²/3 = 0.16.
    "m2po": [[0, 0, 0], [0, 1, 0], [0, 0, 1]],
    "seq_mask_tis": [[2, 0.25, 0.5], [0, 0, 0], [4, 0.25, 1]],
    "seq-mask-tis": [[2, 0.25, 0.5], [0, 0, 0], [4, 0.25, 1]],
    # Row 2 is accepted again after its first token.
    "reinforce_pro": [[2, 0.25, 0.5], [0, 0, 0], [0, 0.25, 1]],
    # Every first token passes; the second of rows 1 and 2 pays for it.
    "baseline_unbiased": [[2, 0.25, 0.5], [8, 0, 0], [4, 0, 1]],
    "sequence": [[0.25, 0.25, 0.25], [2.5, 2.5, 0], [1, 1, 1]],
    "geometric": [[2 ** (-2 / 3)] * 3, [0, 0, 0], [1, 1, 1]],
    # Means of −ln ρ: ⅔ ln 2 = 0.46, negative, 0.
    "sequence_mask": [[0, 0, 0], [1, 1, 0], [1, 1, 1]],
}


@pytest.mark.parametrize("name", NAMES)
def test_weights_by_hand(name: str) -> None:
    correction = correct(name)
    near(correction.weights, WEIGHTS[name])
    assert torch.equal(correction.accepted, correction.weights > 0)


def test_metrics_by_hand() -> None:
    # Σρ = 17, Σρ² = 86.375, Σ ln ρ = ln 2 over 8 tokens; (Π ρ)² = 1/16, 64, 1.
    # Rejected: one token of advantage 1, one of −2, two of ½.
    assert correct("icepop").metrics == pytest.approx(
        {
            "is/accept_frac": 4 / 8,
            "is/w_mean": 17 / 8,
            "is/w_max": 8.0,
            "is/ess": 17**2 / (8 * 86.375),
            "is/chi2_token": 86.375 / 8 - 1,
            "is/chi2_seq": (1 / 16 + 64 + 1) / 3 - 1,
            "is/k3": (17 - 8 - LN2) / 8,
            "is/log_ppl_gap": -(-2 / 3 + 3 / 2 + 0) * LN2 / 3,
            "is/rejected_advantage_pos": (1.0 + 0.5 + 0.5) / 8,
            "is/rejected_advantage_neg": -2.0 / 8,
            "is/veto_frac": 0.0,
        }
    )


def test_veto_drops_rows_with_one_extreme_token_either_way() -> None:
    near(correct("tis", veto=5.0).weights, [[2, 0.4, 0.5], [0, 0, 0], [2.5, 0.4, 1]])
    near(correct("tis", veto=3.0).weights, [[0, 0, 0], [0, 0, 0], [0, 0, 0]])
    metrics = correct("tis", veto=5.0).metrics
    assert metrics["is/veto_frac"] == pytest.approx(1 / 3)
    assert metrics["is/accept_frac"] == pytest.approx(6 / 8)


def test_only_negative_advantages_are_rejected() -> None:
    x = inputs(RATIOS, [-1.0, 2.0, -0.5])
    cfg = CorrectionConfig(name="seq_mask_tis", only_negative=True, **BOUNDS)
    near(compute_correction(x, cfg).weights, [[2, 0.25, 0.5], [8, 1, 0], [4, 0.25, 1]])
    # The veto does not ask for the sign.
    near(compute_correction(x, replace(cfg, veto=5.0)).weights, [[2, 0.25, 0.5], [0, 0, 0], [4, 0.25, 1]])
    masked = CorrectionConfig(name="sequence_mask", only_negative=True, **BOUNDS)
    near(compute_correction(x, masked).weights, [[0, 0, 0], [1, 1, 0], [1, 1, 1]])
    near(correct("sequence_mask", only_negative=True).weights, [[1, 1, 1], [1, 1, 0], [1, 1, 1]])


def test_demonstration_tokens_have_weight_1_and_count_in_no_statistic() -> None:
    # Two demonstration tokens, which the engine gave no log-prob, then ρ = 4 and ¼.
    x = inputs([[1.0, 1.0, 4.0, 0.25]], [1.0], torch.tensor([[True, True, False, False]]))
    x = replace(x, rollout_logprobs=x.rollout_logprobs.index_fill(1, torch.tensor([0, 1]), math.nan))
    alone = inputs([[4.0, 0.25]], [1.0])
    for name in NAMES:
        cfg = CorrectionConfig(name=name, **BOUNDS)
        got, expected = compute_correction(x, cfg), compute_correction(alone, cfg)
        assert got.weights[0, :2].tolist() == [1.0, 1.0]
        assert got.accepted[0, :2].all()
        assert torch.equal(got.weights[:, 2:], expected.weights)
        assert got.metrics == expected.metrics
        assert not got.old_logprobs.isnan().any()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("field", ["old_logprobs", "rollout_logprobs"])
def test_non_finite_logprobs_of_sampled_tokens_raise(field: str, bad: float) -> None:
    x = inputs([[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0])
    values = getattr(x, field).clone()
    values[1, 0] = bad
    with pytest.raises(NonFiniteError, match=r"row 1, token 0: got .*expected finite"):
        compute_correction(replace(x, **{field: values}), CorrectionConfig(name="icepop"))


def algo(name: str, loss: str = "ppo_clip", **cfg: Any) -> AlgoConfig:
    return AlgoConfig(correction=CorrectionConfig(name=name, **cfg), policy_loss=PolicyLossConfig(name=loss))


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (algo("ice_pop"), r"algo\.correction\.name: unknown correction 'ice_pop'; did you mean 'icepop'"),
        (algo("baseline_unbiased", token_cap=2.0), r"token_cap: got 2\.0, .*baseline stays unbiased only if"),
        (algo("baseline_unbiased", veto=9.0), r"veto: got 9\.0, .*baseline stays unbiased only if"),
        (algo("baseline_unbiased", only_negative=True), r"only_negative: got true, .*baseline stays unbiased only if"),
        (algo("baseline_unbiased", normalise=True), r"normalise: got true, .*baseline stays unbiased only if"),
        (
            algo("tis", token_cap=2.0),
            r"^algo\.correction\.token_cap: got 2\.0, which is not read with algo\.correction\.name=tis, which takes "
            r"high, low, normalise, veto; leave it at null, or choose another correction$",
        ),
        (
            algo("sequence", only_negative=True),
            r"only_negative: got true, .*takes high, normalise, veto; leave it at f",
        ),
        (algo("none", veto=9.0), r"veto: got 9\.0, .*algo\.correction\.name=none, which takes forced"),
        (algo("none", low=0.9), r"low: got 0\.9, .*algo\.correction\.name=none, .*leave it at 0\.5"),
        (algo("rollout_ratio", high=2.0), r"high: got 2\.0, .*algo\.correction\.name=rollout_ratio, which takes veto;"),
        (algo("tis_upper", low=0.9), r"low: got 0\.9, .*which takes high, normalise, veto"),
        (algo("sequence", low=0.9), r"low: got 0\.9, .*which takes high, normalise, veto"),
        (algo("sequence_mask", high=9.0), r"high: got 9\.0, .*which takes max_kl_nats, normalise, only_negative, veto"),
        (algo("tis", max_kl_nats=0.2), r"max_kl_nats: got 0\.2, .*algo\.correction\.name=tis"),
        (algo("rollout_ratio", loss="reinforce"), r"name: got 'rollout_ratio' with .*=reinforce, which has no ratio"),
        (algo("tis", loss="gspo"), r"got 'tis' with algo\.policy_loss\.name=gspo.*set algo\.correction\.name=rollout_"),
        (algo("icepop", loss="gspo_token"), r"got 'icepop' with algo\.policy_loss\.name=gspo_token"),
    ],
)
def test_conflicts(cfg: AlgoConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_correction(cfg)
