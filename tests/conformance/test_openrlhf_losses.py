"""Losses, corrections and KL estimators against OpenRLHF."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos.kl import KL_ESTIMATORS
from megarl.algos.mismatch import mismatch_sums
from megarl.algos.objectives import SftAlgorithm, ValueLoss
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.config.algo import CorrectionConfig, PolicyLossConfig
from megarl.types import AlgoState, PolicyOutputs, RowBatch, ValueOutputs
from tests.conformance.batches import (
    SEEDS,
    Batch,
    near_reference,
    objective,
    our_correction,
    our_policy_loss,
    random_batch,
    with_empty_rows,
)
from tests.conformance.compare import (
    COUNT_EPS,
    FLOAT32,
    FLOAT64,
    assert_close,
    assert_same_loss,
    value_and_gradient,
)
from tests.conformance.peer_openrlhf import loss as openrlhf
from tests.conformance.peer_openrlhf import utils as openrlhf_utils

# Ours by OpenRLHF's token_level_loss.
AGGREGATIONS = {True: "token-mean", False: "seq-mean-token-mean"}
LAYOUTS: dict[str, Callable[[int], Batch]] = {
    "holes": lambda seed: random_batch(seed, holes=True),
    "empty rows": lambda seed: with_empty_rows(random_batch(seed)),
}
CLIPS = [(0.2, 0.2), (0.1, 0.4)]


def openrlhf_answers(batch: Batch, logprobs: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Loss, share of clipped tokens, KL to the old policy, KL to the engine, share of rejected tokens or rows."""
    return openrlhf.PolicyLoss(**options)(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        action_mask=batch.mask.double(),
        rollout_log_probs=batch.rollout_logprobs,
    )


@pytest.mark.parametrize("token_level", AGGREGATIONS)
@pytest.mark.parametrize(("low", "high"), CLIPS)
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_clip(seed: int, layout: str, dual_clip: float | None, low: float, high: float, token_level: bool) -> None:
    batch = LAYOUTS[layout](seed)
    cfg = PolicyLossConfig(clip_low=low, clip_high=high, dual_clip=dual_clip)
    options = {"clip_eps_low": low, "clip_eps_high": high, "dual_clip": dual_clip, "token_level_loss": token_level}
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, cfg, AGGREGATIONS[token_level]),
        lambda lp: openrlhf_answers(batch, lp, **options)[0],
        batch.logprobs,
        COUNT_EPS,
    )


# Our correction, and OpenRLHF's options for it.
CORRECTIONS = {
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip"},
    "icepop": {"is_correction_level": "token", "is_correction_mode": "mask"},
    "seq_mask_tis": {"is_correction_level": "seq", "is_correction_mode": "mask"},
}


@pytest.mark.parametrize("token_level", AGGREGATIONS)
@pytest.mark.parametrize(("low", "high"), [(0.5, 5.0), (0.8, 1.25)])
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_corrected_ppo_clip(seed: int, name: str, low: float, high: float, token_level: bool) -> None:
    """Both leave rejected tokens in the denominator."""
    batch = random_batch(seed, holes=True)
    options = {
        **CORRECTIONS[name],
        "is_correction_threshold": (low, high),
        "token_level_loss": token_level,
        "dual_clip": 3.0,
    }
    correction = our_correction(batch, CorrectionConfig(name=name, low=low, high=high))
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, PolicyLossConfig(), AGGREGATIONS[token_level], correction.weights),
        lambda lp: openrlhf_answers(batch, lp, **options)[0],
        batch.logprobs,
        COUNT_EPS,
    )
    *_, engine_kl, rejected = openrlhf_answers(batch, batch.logprobs, **options)
    mismatch = mismatch_sums(batch.rollout_logprobs, batch.old_logprobs, batch.mask).metrics()
    assert_close(torch.tensor(mismatch["mismatch/k1"], dtype=torch.float64), engine_kl, FLOAT64)
    if name == "icepop":
        accepted = torch.tensor(correction.metrics["is/accept_frac"])
        assert_close(1 - accepted, rejected, FLOAT32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("low", "high"), CLIPS)
@pytest.mark.parametrize("to_engine", [False, True], ids=["old", "engine"])
@pytest.mark.parametrize("seed", SEEDS)
def test_gspo(seed: int, to_engine: bool, low: float, high: float, layout: str) -> None:
    """With a correction, OpenRLHF takes GSPO's ratio to the engine's log-probs: our rollout_ratio."""
    batch = LAYOUTS[layout](seed)
    name = "rollout_ratio" if to_engine else "none"
    old_logprobs = our_correction(batch, CorrectionConfig(name=name)).old_logprobs
    options = {
        "policy_loss_type": "gspo",
        "clip_eps_low": low,
        "clip_eps_high": high,
        "is_correction_level": "token" if to_engine else "off",
    }

    def ours(logprobs: Tensor) -> Tensor:
        x = PolicyLossInputs(
            logprobs=logprobs, old_logprobs=old_logprobs, advantages=batch.advantages, loss_mask=batch.mask
        )
        cfg = PolicyLossConfig(name="gspo", clip_low=low, clip_high=high)
        return objective(policy_loss(x, cfg).loss, batch.mask, "seq-mean-token-mean")

    assert_same_loss(ours, lambda lp: openrlhf_answers(batch, lp, **options)[0], batch.logprobs, COUNT_EPS)


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed: int, clip: float | None) -> None:
    batch = random_batch(seed, holes=True)
    rows = RowBatch(
        labels=batch.uids, loss_mask=batch.mask, quantities={"returns": batch.returns, "values": batch.values}
    )
    assert_same_loss(
        lambda v: (
            ValueLoss(clip=clip).loss(rows, ValueOutputs(values=v), AlgoState()).objective["tokens"] / batch.num_tokens
        ),
        lambda v: openrlhf.ValueLoss(clip_eps=clip)(v, batch.values, batch.returns, batch.mask.double()),
        batch.values + batch.advantages,
        FLOAT64,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_supervised_loss(seed: int) -> None:
    batch = random_batch(seed, holes=True)
    rows = RowBatch(labels=batch.uids, loss_mask=batch.mask, quantities={})

    def ours(logprobs: Tensor) -> Tensor:
        out = PolicyOutputs(logprobs=logprobs, entropy=None)
        return SftAlgorithm().loss(rows, out, AlgoState()).objective["tokens"] / batch.num_tokens

    assert_same_loss(ours, lambda lp: openrlhf.SFTLoss()(lp, batch.mask.double()), batch.logprobs, FLOAT64)


# OpenRLHF's name, its unbiased_gradient; ours of that value, ours of that gradient.
KL_CASES = [
    ("k1", False, "k1", "k1"),
    ("k2", False, "k2", "k2"),
    ("k3", False, "k3", "k3"),
    ("k1", True, "k1", "k2"),
    ("k2", True, "k2", "k2"),
    ("k3", True, "k3_straight_through", "k3_straight_through"),
]


@pytest.mark.parametrize(("name", "unbiased", "value_of", "gradient_of"), KL_CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_per_token(seed: int, name: str, unbiased: bool, value_of: str, gradient_of: str) -> None:
    """Known difference: `unbiased_gradient` gives every estimator the gradient of k2; ours has that form of k3."""
    batch = near_reference(random_batch(seed))

    def theirs(logprobs: Tensor) -> Tensor:
        return openrlhf_utils.compute_approx_kl(
            logprobs, batch.ref_logprobs, kl_estimator=name, unbiased_gradient=unbiased
        )

    def gradient(estimator: Callable[[Tensor], Tensor]) -> Tensor:
        return value_and_gradient(lambda lp: (batch.advantages * estimator(lp)).sum(), batch.logprobs)[1]

    ours = KL_ESTIMATORS.get(value_of).compute(batch.logprobs, batch.ref_logprobs)
    assert_close(ours, theirs(batch.logprobs), FLOAT32)
    differentiated = KL_ESTIMATORS.get(gradient_of).compute
    assert_close(gradient(lambda lp: differentiated(lp, batch.ref_logprobs)), gradient(theirs), FLOAT32)


@pytest.mark.parametrize(("name", "clamped"), [("k1", True), ("k2", True), ("k3", False)])
@pytest.mark.parametrize("distance", [15.0, -15.0, 25.0])
def test_kl_far_from_the_reference(name: str, clamped: bool, distance: float) -> None:
    """Known difference: OpenRLHF cuts every estimator at ±10; here k1 and k2 are not cut, k3 is at the same number."""
    batch = random_batch(0)
    ref = batch.logprobs - distance
    theirs = openrlhf_utils.compute_approx_kl(batch.logprobs, ref, kl_estimator=name)
    ours = KL_ESTIMATORS.get(name).compute(batch.logprobs, ref)
    assert_close(ours.clamp(-10, 10), theirs, FLOAT32)
    assert bool((ours.abs() > 10).all()) == clamped
