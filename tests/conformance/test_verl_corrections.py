"""Corrections for the rollout engine's log-probs against verl's rollout correction."""

import math

import pytest
import torch
from torch import Tensor
from verl.trainer.ppo import rollout_corr_helper

from megarl.algos.mismatch import mismatch_sums
from megarl.config.algo import CorrectionConfig
from tests.conformance.batches import SEEDS, Batch, our_correction, random_batch, with_empty_rows
from tests.conformance.compare import COUNT_EPS, FLOAT64, assert_close

LOW, HIGH = 0.5, 2.0


def verl_weights(batch: Batch, level: str, threshold: float | str, *, normalise: bool = False) -> Tensor:
    return rollout_corr_helper.compute_rollout_correction_weights(
        batch.old_logprobs - batch.rollout_logprobs, batch.mask.double(), level, threshold, normalise
    )[0]


def verl_accepted(batch: Batch, criterion: str, threshold: str | float) -> Tensor:
    """Loss tokens [B, T] that verl's rejection leaves in the loss mask."""
    mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        batch.old_logprobs - batch.rollout_logprobs, batch.mask.double(), criterion, threshold
    )
    return mask.bool()


# Our correction, verl's level, verl's threshold: one number truncates, two reject.
WEIGHTS = [
    ("tis_upper", "token", HIGH),
    ("icepop", "token", f"{LOW}_{HIGH}"),
    ("sequence", "sequence", HIGH),
]


@pytest.mark.parametrize(("name", "level", "threshold"), WEIGHTS)
@pytest.mark.parametrize("empty", [False, True], ids=["full", "empty rows"])
@pytest.mark.parametrize("seed", SEEDS)
def test_weights(seed: int, empty: bool, name: str, level: str, threshold: float | str) -> None:
    batch = random_batch(seed, holes=True)
    batch = with_empty_rows(batch) if empty else batch
    ours = our_correction(batch, CorrectionConfig(name=name, low=LOW, high=HIGH)).weights
    theirs = verl_weights(batch, level, threshold)
    assert len(theirs[batch.mask].unique()) > 2
    assert_close(ours, theirs, FLOAT64)


@pytest.mark.parametrize("seed", SEEDS)
def test_token_weights_of_mean_one(seed: int) -> None:
    batch = random_batch(seed, holes=True)
    cfg = CorrectionConfig(name="tis_upper", low=LOW, high=HIGH, normalise=True)
    assert_close(our_correction(batch, cfg).weights, verl_weights(batch, "token", HIGH, normalise=True), COUNT_EPS)


@pytest.mark.parametrize("seed", SEEDS)
def test_row_weights_of_mean_one_differ_in_what_is_averaged(seed: int) -> None:
    """Known difference: weights of rows have mean 1 over tokens here, over rows in verl."""
    batch = random_batch(seed, holes=True)
    cfg = CorrectionConfig(name="sequence", low=LOW, high=HIGH, normalise=True)
    ours, theirs = our_correction(batch, cfg).weights, verl_weights(batch, "sequence", HIGH, normalise=True)
    row_means = (theirs * batch.mask).sum(dim=-1) / batch.mask.sum(dim=-1)
    assert_close(ours[batch.mask].mean(), torch.tensor(1.0), FLOAT64)
    assert_close(row_means.mean(), torch.tensor(1.0), COUNT_EPS)
    assert_close(ours * theirs[batch.mask].mean(), theirs, COUNT_EPS)


# Our gate, verl's criterion, verl's threshold. verl bounds 1/ρ where we bound ρ.
INVERSE = f"{1 / HIGH}_{1 / LOW}"
GATES = [
    (CorrectionConfig(name="icepop", low=LOW, high=HIGH), "token_k1", INVERSE),
    (CorrectionConfig(name="seq_mask_tis", low=0.8, high=1.25), "seq_mean_k1", "0.8_1.25"),
    (CorrectionConfig(name="geometric", low=0.9, high=1.6), "seq_mean_k1", f"{1 / 1.6}_{1 / 0.9}"),
    (CorrectionConfig(name="sequence_mask", max_kl_nats=0.1), "seq_mean_k1", f"1e-300_{math.exp(0.1)}"),
]


@pytest.mark.parametrize(("cfg", "criterion", "threshold"), GATES, ids=[case[0].name for case in GATES])
@pytest.mark.parametrize("seed", SEEDS)
def test_gates(seed: int, cfg: CorrectionConfig, criterion: str, threshold: str) -> None:
    batch = random_batch(seed, holes=True)
    ours, theirs = our_correction(batch, cfg).accepted, verl_accepted(batch, criterion, threshold)
    assert theirs.any()
    assert not theirs[batch.mask].all()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_veto_is_a_bound_of_the_largest_k2(seed: int) -> None:
    """A token with ρ > v or ρ < 1/v vetoes its row: ½ ln² ρ > ½ ln² v, if no gate rejects more."""
    batch = random_batch(seed, holes=True)
    veto = 2.4
    cfg = CorrectionConfig(name="tis_upper", high=HIGH, veto=veto)
    theirs = verl_accepted(batch, "seq_max_k2", 0.5 * math.log(veto) ** 2)
    assert theirs.any()
    assert not theirs[batch.mask].all()
    assert torch.equal(our_correction(batch, cfg).accepted, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_rejected_tokens_differ_in_the_denominator(seed: int) -> None:
    """Known difference: rejected tokens stay in our denominator; verl's rejection takes them out of the loss mask."""
    batch = random_batch(seed)
    cfg = CorrectionConfig(name="icepop", low=LOW, high=HIGH)
    kept = verl_accepted(batch, "token_k1", INVERSE)
    loss = batch.advantages * our_correction(batch, cfg).weights
    ours = loss[batch.mask].sum() / batch.num_tokens
    theirs = rollout_corr_helper.verl_F.masked_mean(batch.advantages * verl_weights(batch, "token", 1e9), kept.double())
    assert_close(ours, theirs * kept.sum() / batch.num_tokens, COUNT_EPS)


@pytest.mark.parametrize("seed", SEEDS)
def test_diagnostics(seed: int) -> None:
    batch = random_batch(seed, holes=True)
    ours = our_correction(batch, CorrectionConfig(name="tis_upper", low=LOW, high=HIGH)).metrics
    mismatch = mismatch_sums(batch.rollout_logprobs, batch.old_logprobs, batch.mask).metrics()
    theirs = rollout_corr_helper.compute_offpolicy_metrics(
        batch.old_logprobs, batch.rollout_logprobs, batch.mask.double()
    )
    _, of_weights = rollout_corr_helper.compute_rollout_correction_weights(
        batch.old_logprobs - batch.rollout_logprobs, batch.mask.double(), "token", HIGH
    )
    pairs = [
        (ours["is/k3"], theirs["k3_kl"]),
        (ours["is/chi2_token"], theirs["chi2_token"]),
        (ours["is/chi2_seq"], theirs["chi2_seq"]),
        (ours["is/log_ppl_gap"], theirs["log_ppl_diff"]),
        (mismatch["mismatch/k1"], theirs["kl"]),
        (ours["is/w_mean"], of_weights["rollout_is_mean"]),
        (ours["is/w_max"], of_weights["rollout_is_max"]),
        (ours["is/ess"], of_weights["rollout_is_eff_sample_size"]),
    ]
    assert_close(*torch.tensor(pairs, dtype=torch.float64).T, 4 * COUNT_EPS)
