"""Corrections for the rollout engine's log-probs: weights, gates, vetoes, and what they leave of the gradient."""

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algos.corrections import CORRECTIONS, Correction, CorrectionInputs, compute_correction
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.algos.validate import check_correction
from megarl.config.algo import AlgoConfig, CorrectionConfig, PolicyLossConfig
from megarl.config.setting import check_values
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


def test_token_cap_bounds_what_a_gate_lets_pass() -> None:
    near(correct("seq_mask_tis", token_cap=3.0).weights, [[2, 0.25, 0.5], [0, 0, 0], [3, 0.25, 1]])


def test_only_negative_advantages_are_rejected() -> None:
    x = inputs(RATIOS, [-1.0, 2.0, -0.5])
    cfg = CorrectionConfig(name="seq_mask_tis", only_negative=True, **BOUNDS)
    near(compute_correction(x, cfg).weights, [[2, 0.25, 0.5], [8, 1, 0], [4, 0.25, 1]])
    # The veto does not ask for the sign.
    near(compute_correction(x, replace(cfg, veto=5.0)).weights, [[2, 0.25, 0.5], [0, 0, 0], [4, 0.25, 1]])
    masked = CorrectionConfig(name="sequence_mask", only_negative=True, **BOUNDS)
    near(compute_correction(x, masked).weights, [[0, 0, 0], [1, 1, 0], [1, 1, 1]])
    near(correct("sequence_mask", only_negative=True).weights, [[1, 1, 1], [1, 1, 0], [1, 1, 1]])


def test_normalised_weights_have_mean_1_over_sampled_tokens() -> None:
    mean = (2 + 0.5 + 1 + 1) / 8
    near(
        correct("icepop", normalise=True).weights,
        [[2 / mean, 0, 0.5 / mean], [0, 1 / mean, 0], [0, 0, 1 / mean]],
    )
    # Nothing accepted: zeros, not 0/0.
    assert correct("tis", normalise=True, veto=1.1).weights.count_nonzero() == 0


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


def test_rollout_ratio_golden_gspo(golden: Any, check_golden: Any) -> None:
    case = golden("D.gspo.rollout_True")
    _, loss_inputs = golden_loss(case, CorrectionConfig(name="rollout_ratio"))
    eps = {"clip_low": case["params"]["eps_low"], "clip_high": case["params"]["eps_high"]}
    loss = policy_loss(loss_inputs, PolicyLossConfig(name="gspo", **eps)).loss
    check_golden((loss.sum(1) / loss_inputs.loss_mask.sum(1)).mean(), case["expected"]["loss"], case)
    # s itself, where nothing is clipped: with A = −1 the loss is s.
    wide = PolicyLossConfig(name="gspo", clip_low=0.99, clip_high=9.0)
    ratios = policy_loss(replace(loss_inputs, advantages=-torch.ones_like(loss_inputs.advantages)), wide).loss[:, 0]
    check_golden(ratios, case["expected"]["ratio"], case)


def test_only_rollout_ratio_changes_what_the_policy_ratio_is_taken_to() -> None:
    x = inputs(RATIOS, ADVANTAGES)
    for name in NAMES:
        old = compute_correction(x, CorrectionConfig(name=name)).old_logprobs
        expected = x.rollout_logprobs if name == "rollout_ratio" else x.old_logprobs
        assert torch.equal(old[x.loss_mask], expected[x.loss_mask])


@st.composite
def batches(draw: st.DrawFn) -> CorrectionInputs:
    """A few rows of noise, some without loss tokens, some places between them environment tokens or demonstrations."""
    num_rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scale = draw(st.sampled_from([0.1, 1.0, 30.0]))

    def noise() -> Tensor:
        return torch.randn(num_rows, width, dtype=torch.float64, generator=generator)

    return CorrectionInputs(
        old_logprobs=noise() * scale - 1,
        rollout_logprobs=noise() * scale - 1,
        advantages=noise(),
        loss_mask=noise() > -0.7,
        demonstration_mask=noise() > 1.2,
    )


def mapped(x: CorrectionInputs, change: Any) -> CorrectionInputs:
    return CorrectionInputs(**{f.name: change(getattr(x, f.name)) for f in fields(x)})


OPTIONS = {"token_cap": 2.0, "veto": 20.0, "only_negative": True, "normalise": True}


def configurations() -> st.SearchStrategy[CorrectionConfig]:
    """Every preset, with and without the options it takes."""
    plain = [CorrectionConfig(name=name) for name in NAMES]
    full = [
        CorrectionConfig(name=name, **{o: v for o, v in OPTIONS.items() if o in CORRECTIONS.get(name).options})  # type: ignore[arg-type]
        for name in NAMES
    ]
    return st.sampled_from(plain + full)


@given(x=batches(), cfg=configurations())
def test_equal_logprobs_leave_every_weight_at_1(x: CorrectionInputs, cfg: CorrectionConfig) -> None:
    got = compute_correction(replace(x, rollout_logprobs=x.old_logprobs.clone()), cfg)
    assert torch.equal(got.weights, x.loss_mask.double())
    assert torch.equal(got.accepted, x.loss_mask)
    has_tokens = float((x.loss_mask & ~x.demonstration_mask).any())
    shares = ("is/accept_frac", "is/w_mean", "is/w_max", "is/ess")
    assert got.metrics == {name: has_tokens if name in shares else 0.0 for name in got.metrics}


@given(x=batches(), cfg=configurations(), data=st.data())
def test_permutation_padding_and_no_mutation(x: CorrectionInputs, cfg: CorrectionConfig, data: st.DataObject) -> None:
    before = mapped(x, torch.clone)
    plain = compute_correction(x, cfg)
    assert all(torch.equal(getattr(x, f.name), getattr(before, f.name)) for f in fields(x))
    assert plain.weights[~x.loss_mask].count_nonzero() == 0

    order = torch.tensor(data.draw(st.permutations(range(len(x.loss_mask)))))
    permuted = compute_correction(mapped(x, lambda t: t[order]), cfg)
    torch.testing.assert_close(permuted.weights, plain.weights[order], rtol=1e-12, atol=0)
    assert permuted.metrics == pytest.approx(plain.metrics, rel=1e-9, abs=1e-12)

    def pad(t: Tensor) -> Tensor:
        tail = t.new_zeros(len(t), 2) if t.dtype == torch.bool else t.new_full((len(t), 2), math.nan)
        return torch.cat([t, tail], dim=1)

    padded = compute_correction(mapped(x, pad), cfg)
    torch.testing.assert_close(padded.weights[:, :-2], plain.weights, rtol=1e-12, atol=0)
    assert padded.weights[:, -2:].count_nonzero() == 0
    assert padded.metrics == pytest.approx(plain.metrics, rel=1e-9, abs=1e-12)


@given(x=batches(), name=st.sampled_from([name for name in NAMES if not CORRECTIONS.get(name).whole]))
def test_rows_do_not_depend_on_each_other(x: CorrectionInputs, name: str) -> None:
    cfg = CorrectionConfig(name=name)
    parts = [compute_correction(mapped(x, lambda t, i=i: t[i : i + 1]), cfg).weights for i in range(len(x.loss_mask))]
    assert torch.equal(torch.cat(parts), compute_correction(x, cfg).weights)


@pytest.mark.parametrize("name", NAMES)
def test_float32_logprobs(name: str) -> None:
    x = inputs(RATIOS, ADVANTAGES)
    single = mapped(x, lambda t: t if t.dtype == torch.bool else t.float())
    cfg = CorrectionConfig(name=name, **BOUNDS)
    weights = compute_correction(single, cfg).weights
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), compute_correction(x, cfg).weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_correct(name: str, shape: tuple[int, int]) -> None:
    empty, values = torch.zeros(shape, dtype=torch.bool), torch.full(shape, math.nan)
    x = CorrectionInputs(
        old_logprobs=values, rollout_logprobs=values, advantages=values, loss_mask=empty, demonstration_mask=empty
    )
    got = compute_correction(x, CorrectionConfig(name=name))
    assert got.weights.count_nonzero() == 0
    assert set(got.metrics.values()) == {0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["old_logprobs", "rollout_logprobs"])
def test_non_finite_logprobs_of_sampled_tokens_raise(field: str, bad: float) -> None:
    x = inputs([[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0])
    values = getattr(x, field).clone()
    values[1, 0] = bad
    with pytest.raises(NonFiniteError, match=r"row 1, token 0: got .*expected finite"):
        compute_correction(replace(x, **{field: values}), CorrectionConfig(name="icepop"))


def test_extreme_ratios_stay_finite() -> None:
    for ratio in (1e-300, 1e300):
        correction = compute_correction(inputs([[ratio] * 50], [1.0]), CorrectionConfig(name="seq_mask_tis"))
        assert all(math.isfinite(value) for value in correction.metrics.values())
        assert correction.metrics["is/w_max"] == pytest.approx(math.exp(20 if ratio > 1 else -20))


VOCAB = 3


def expected_gradients(name: str, *, seed: int, outcome: Tensor | None = None, **cfg: Any) -> tuple[Tensor, Tensor]:
    """E_engine[Σ_t w_t R ∇ ln π(y_t)] and ∇ E_trainer[R], exactly, over all pairs of tokens; R is 1 by default."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> tuple[Tensor, Tensor]:
        first = torch.randn(VOCAB, dtype=torch.float64, generator=generator)
        return first, torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator)

    logits = [t.requires_grad_() for t in noise()]
    engine = [(t + 0.5 * e).detach() for t, e in zip(logits, noise(), strict=True)]
    pairs = list(itertools.product(range(VOCAB), repeat=2))

    def logprobs(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([torch.stack([first.log_softmax(-1)[a], second.log_softmax(-1)[a, b]]) for a, b in pairs])

    trainer_lp, engine_lp = logprobs(*logits), logprobs(*engine)
    outcome = torch.ones(len(pairs), dtype=torch.float64) if outcome is None else outcome
    mask = torch.ones(len(pairs), 2, dtype=torch.bool)
    correction = compute_correction(
        CorrectionInputs(
            old_logprobs=trainer_lp.detach(),
            rollout_logprobs=engine_lp,
            advantages=outcome[:, None].expand(-1, 2),
            loss_mask=mask,
            demonstration_mask=~mask,
        ),
        CorrectionConfig(name=name, **cfg),
    )
    surrogate = (engine_lp.sum(1).exp() * outcome * (correction.weights * trainer_lp).sum(1)).sum()
    target = (trainer_lp.sum(1).exp() * outcome).sum()
    got, expected = (torch.autograd.grad(value, logits, retain_graph=True) for value in (surrogate, target))
    return torch.cat([g.flatten() for g in got]), torch.cat([g.flatten() for g in expected])


@pytest.mark.parametrize("seed", range(5))
def test_a_baseline_cancels_only_behind_a_gate_that_does_not_look_at_its_token(seed: int) -> None:
    bounds: dict[str, Any] = {"low": 0.8, "high": 1.25}
    exact, _ = expected_gradients("baseline_unbiased", seed=seed, **bounds)
    assert exact.abs().max() < 1e-12
    for name in ("icepop", "seq_mask_tis", "reinforce_pro"):
        biased, _ = expected_gradients(name, seed=seed, **bounds)
        assert biased.abs().max() > 1e-3


def test_whole_row_importance_sampling_is_exact_without_truncation() -> None:
    outcome = torch.linspace(-1, 2, VOCAB**2, dtype=torch.float64).square()
    got, expected = expected_gradients("sequence", seed=0, outcome=outcome, high=1e9)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    first_order, _ = expected_gradients("tis_upper", seed=0, outcome=outcome, high=1e9)
    assert (first_order - expected).abs().max() > 1e-2


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


@pytest.mark.parametrize(("low", "high"), [(2.0, 2.0), (1.0, 1.0), (1.5, 5.0)])
def test_bounds_accept_a_ratio_of_1(low: float, high: float) -> None:
    message = rf"^algo\.correction\.low and .*got {low} and {high}, expected low <= 1 <= high and low < high"
    with pytest.raises(ConfigError, match=message):
        check_values(CorrectionConfig(name="tis", low=low, high=high), ("algo",), "algo.correction")


@pytest.mark.parametrize(
    "cfg",
    [
        *(algo(name) for name in NAMES),
        algo("reinforce_pro", token_cap=2.0, veto=9.0, only_negative=True, normalise=True),
        algo("sequence_mask", only_negative=True),
        algo("rollout_ratio", loss="gspo", veto=9.0),
        algo("none", loss="gspo"),
        algo("tis", loss="reinforce", low=0.1, high=2.0),
        algo("geometric", low=0.9, high=1.1),
        algo("sequence_mask", max_kl_nats=0.2),
        algo("tis", loss="cispo", low=0.0),
    ],
)
def test_accepted(cfg: AlgoConfig) -> None:
    check_correction(cfg)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Π ρ = e^5, whose exponent no token decides alone.
        ("sequence", [math.exp(5), math.exp(5)]),
        # (Π ρ)^(1/2) = e^2.5.
        ("geometric", [math.exp(2.5), math.exp(2.5)]),
        # Tokens, too, are bounded only by themselves.
        ("seq_mask_tis", [math.exp(-20), math.exp(20)]),
        ("reinforce_pro", [0.0, math.exp(20)]),
        ("baseline_unbiased", [math.exp(-20), 0.0]),
        # The mean of −ln ρ is −2.5.
        ("sequence_mask", [1.0, 1.0]),
    ],
)
def test_sums_over_tokens_are_bounded_as_sums(name: str, expected: list[float]) -> None:
    x = inputs([[math.exp(-45), math.exp(50)]], [1.0])
    correction = compute_correction(x, CorrectionConfig(name=name, low=1e-4, high=1e6, max_kl_nats=0.0))
    torch.testing.assert_close(correction.weights, f64([expected]), rtol=1e-12, atol=0)
    # Its square is e^10; the gap of log-perplexities is −2.5.
    assert correction.metrics["is/chi2_seq"] == pytest.approx(math.expm1(10))
    assert correction.metrics["is/log_ppl_gap"] == pytest.approx(-2.5)


def test_a_veto_compares_what_a_token_has() -> None:
    x = inputs([[math.exp(25), 1.0]], [1.0])
    near(compute_correction(x, CorrectionConfig(name="tis", veto=math.exp(26))).weights, [[5.0, 1.0]])
    near(compute_correction(x, CorrectionConfig(name="tis", veto=math.exp(24))).weights, [[0.0, 0.0]])


@pytest.mark.parametrize("normalise", [False, True])
def test_a_step_of_many_tokens_is_corrected_a_block_at_a_time(normalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float64 temporaries of a whole step would take 100 bytes a token; results are those of rows alone."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(5, 30_000, generator=generator)
    mask = torch.arange(30_000) < torch.tensor([[30_000], [2], [12_345], [0], [29_999]])
    x = CorrectionInputs(
        old_logprobs=log_ratio - 1.0,
        rollout_logprobs=torch.full_like(log_ratio, -1.0),
        advantages=torch.randn(5, 1, generator=generator).expand_as(log_ratio),
        loss_mask=mask,
        demonstration_mask=torch.zeros_like(mask),
    )
    seen = list[int]()
    rule = CORRECTIONS.get("tis")

    def weight(ratios: Any, cfg: CorrectionConfig) -> Tensor:
        seen.append(ratios.token.numel())
        return rule.weight(ratios, cfg)

    monkeypatch.setattr(CORRECTIONS, "get", lambda name: replace(rule, weight=weight))
    cfg = CorrectionConfig(name="tis", low=0.5, high=2.0, normalise=normalise)
    got = compute_correction(x, cfg)
    assert len(seen) > 1
    assert max(seen) <= 1 << 16
    weights = torch.where(mask, (x.old_logprobs.double() + 1.0).exp().clamp(0.5, 2.0), 0.0)
    assert got.metrics["is/w_mean"] == pytest.approx(float(weights.sum() / mask.sum()), rel=1e-12)
    assert got.metrics["is/w_max"] == 2.0
    if normalise:
        weights = weights / (weights.sum() / mask.sum())
    torch.testing.assert_close(got.weights, weights.float(), rtol=1e-7, atol=0)
    spoiled = x.old_logprobs.clone()
    spoiled[4, 7] = torch.nan
    with pytest.raises(NonFiniteError, match="log-probs of row 4, token 7: got nan"):
        compute_correction(replace(x, old_logprobs=spoiled), cfg)
