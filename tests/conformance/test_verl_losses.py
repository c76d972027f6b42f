"""Losses and their aggregation against verl."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig as VerlPolicyLossConfig

import megarl.algos.off_policy_losses  # noqa: F401 - registers losses
from megarl.algos.aggregation import AGGREGATIONS, RowCounts, global_denominator
from megarl.algos.covariance import choose_tokens, token_covariance
from megarl.algos.objectives import ValueLoss
from megarl.algos.policy_losses import PolicyLossInputs, policy_loss
from megarl.config.algo import PolicyLossConfig
from megarl.types import AlgoState, RowBatch, ValueOutputs
from tests.conformance.batches import (
    HORIZON_TOKENS,
    SEEDS,
    Batch,
    objective,
    our_policy_loss,
    random_batch,
    with_empty_rows,
    with_row_advantages,
)
from tests.conformance.compare import COUNT_EPS, FLOAT32, FLOAT64, assert_close, assert_same_loss, value_and_gradient

# Ours by verl's name. verl divides its seq-mean-token-sum-norm by the number of rows too: that is our dr_grpo.
AGGREGATION_NAMES = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "dr_grpo",
}
LAYOUTS: dict[str, Callable[[int], Batch]] = {
    "holes": lambda seed: random_batch(seed, holes=True),
    "empty rows": lambda seed: with_empty_rows(random_batch(seed)),
}
# Low, high; asymmetric, as DAPO and CISPO have it.
CLIPS = [(0.2, 0.2), (0.1, 0.4)]


def actor_config(cfg: PolicyLossConfig) -> ActorConfig:
    return ActorConfig(
        strategy="megatron",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=cfg.clip_low,
        clip_ratio_low=cfg.clip_low,
        clip_ratio_high=cfg.clip_high,
        clip_ratio_c=3.0 if cfg.dual_clip is None else cfg.dual_clip,
        tau_pos=cfg.tau_pos,
        tau_neg=cfg.tau_neg,
        policy_loss=VerlPolicyLossConfig(
            clip_cov_ratio=cfg.cov_share,
            clip_cov_lb=cfg.cov_low,
            clip_cov_ub=cfg.cov_high,
            kl_cov_ratio=cfg.cov_share,
            ppo_kl_coef=cfg.cov_kl_coef,
        ),
        global_batch_info={"loss_scale_factor": HORIZON_TOKENS},
    )


def verl_policy_loss(
    name: str, batch: Batch, cfg: PolicyLossConfig, aggregation: str, weights: Tensor | None = None
) -> Callable[[Tensor], tuple[Tensor, dict[str, Any]]]:
    """The loss and its metrics as a function of the log-probs."""

    def loss(logprobs: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return core_algos.get_policy_loss_fn(name)(
            old_log_prob=batch.old_logprobs.clone(),
            log_prob=logprobs,
            advantages=batch.advantages.clone(),
            response_mask=batch.mask.double(),
            loss_agg_mode=aggregation,
            config=actor_config(cfg),
            rollout_is_weights=None if weights is None else weights.clone(),
        )

    return loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", AGGREGATION_NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_aggregation(seed: int, name: str, layout: str) -> None:
    batch = LAYOUTS[layout](seed)
    assert_same_loss(
        lambda loss: objective(loss, batch.mask, AGGREGATION_NAMES[name]),
        lambda loss: core_algos.agg_loss(loss, batch.mask.double(), name, loss_scale_factor=HORIZON_TOKENS),
        batch.advantages,
        COUNT_EPS,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_aggregation_of_the_same_name_differs_by_the_number_of_rows(seed: int) -> None:
    """Known difference: seq-mean-token-sum-norm is Σ / horizon here, Σ / rows / horizon in verl since 0.9."""
    batch = random_batch(seed)
    name = "seq-mean-token-sum-norm"
    assert_same_loss(
        lambda loss: objective(loss, batch.mask, name),
        lambda loss: (
            batch.num_rows * core_algos.agg_loss(loss, batch.mask.double(), name, loss_scale_factor=HORIZON_TOKENS)
        ),
        batch.advantages,
        FLOAT64,
    )


@pytest.mark.parametrize("name", AGGREGATION_NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_micro_batch_is_divided_by_the_counts_of_all(seed: int, name: str) -> None:
    """One of two data-parallel ranks: verl multiplies by their number, as its gradients are averaged over them."""
    batch = random_batch(seed)
    entry = AGGREGATIONS.get(AGGREGATION_NAMES[name])
    counts = RowCounts(num_rows=batch.num_rows, num_tokens=batch.num_tokens)
    rows = slice(2, 6)
    counted = "batch_num_tokens" if name == "token-mean" else "global_batch_size"
    num_all = batch.num_tokens if name == "token-mean" else batch.num_rows

    def theirs(loss: Tensor) -> Tensor:
        known: dict[str, Any] = {counted: num_all, "loss_scale_factor": HORIZON_TOKENS}
        return core_algos.agg_loss(loss[rows], batch.mask[rows].double(), name, dp_size=2, **known) / 2

    def ours(loss: Tensor) -> Tensor:
        denominator = global_denominator(entry, counts, horizon_tokens=HORIZON_TOKENS)
        return entry.local_sum(loss[rows], batch.mask[rows]) / denominator

    assert_same_loss(ours, theirs, batch.advantages, COUNT_EPS)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("aggregation", AGGREGATION_NAMES)
@pytest.mark.parametrize(("low", "high"), CLIPS)
@pytest.mark.parametrize("dual_clip", [1.5, 3.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_clip(seed: int, dual_clip: float, low: float, high: float, aggregation: str, weighted: bool) -> None:
    batch = random_batch(seed, holes=True)
    cfg = PolicyLossConfig(name="ppo_clip", clip_low=low, clip_high=high, dual_clip=dual_clip)
    weights = batch.values.exp() if weighted else None
    theirs = verl_policy_loss("vanilla", batch, cfg, aggregation, weights)
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, cfg, AGGREGATION_NAMES[aggregation], weights),
        lambda lp: theirs(lp)[0],
        batch.logprobs,
        COUNT_EPS,
    )


@pytest.mark.parametrize(("name", "verl_name"), [("ppo_clip", "vanilla"), ("cispo", "cispo"), ("gspo_token", "gspo")])
@pytest.mark.parametrize("seed", SEEDS)
def test_diagnostics(seed: int, name: str, verl_name: str) -> None:
    """Token means of the same name; a loss without a dual clip has no share of tokens that it decided."""
    batch = random_batch(seed, holes=True)
    cfg = PolicyLossConfig(name=name, clip_low=0.2, clip_high=0.2, dual_clip=1.5)
    x = PolicyLossInputs(
        logprobs=batch.logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.mask,
    )
    ours = {key: value[batch.mask].mean() for key, value in policy_loss(x, cfg).diagnostics.items()}
    _, theirs = verl_policy_loss(verl_name, batch, cfg, "token-mean")(batch.logprobs)
    assert ours.keys() - theirs.keys() == set()
    for key, value in ours.items():
        assert_close(value, torch.tensor(theirs[key]), FLOAT32)
    assert any(value > 0 for key, value in ours.items() if "clipfrac" in key)


@pytest.mark.parametrize("distance", [25.0, -25.0], ids=["above", "below"])
@pytest.mark.parametrize(("name", "verl_name"), [("ppo_clip", "vanilla"), ("cispo", "cispo")])
def test_ratios_beyond_the_clamp(name: str, verl_name: str, distance: float) -> None:
    """Log-ratios of ±25 are those of ±20 to both; the policy gradient may be 0 everywhere."""
    batch = random_batch(0)
    batch = replace(batch, old_logprobs=batch.logprobs - distance)
    cfg = PolicyLossConfig(name=name, dual_clip=1e12)
    theirs = verl_policy_loss(verl_name, batch, cfg, "token-mean")
    answers = [
        value_and_gradient(loss, batch.logprobs)
        for loss in (lambda lp: our_policy_loss(batch, lp, cfg, "token-mean"), lambda lp: theirs(lp)[0])
    ]
    for mine, peers in zip(*answers, strict=True):
        assert_close(mine, peers, FLOAT64)


@pytest.mark.parametrize("aggregation", AGGREGATION_NAMES)
@pytest.mark.parametrize(("low", "high"), [(0.05, 0.05), (0.02, 0.1)])
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("seed", SEEDS)
def test_dppo(seed: int, name: str, low: float, high: float, aggregation: str) -> None:
    """Gradients: verl's loss is −A·sg(r)·lp where ours is −A·r. Its truncation of ratios is switched off."""
    batch = random_batch(seed, holes=True)
    # Log-probs of probabilities, of which both take the difference to 1.
    batch = replace(batch, logprobs=batch.logprobs - 0.01, old_logprobs=batch.old_logprobs.clamp(max=-0.01))
    cfg = PolicyLossConfig(name=name, clip_low=low, clip_high=high, dual_clip=1e12)
    theirs = verl_policy_loss(name, batch, cfg, aggregation)
    (_, ours), (_, peers) = (
        value_and_gradient(loss, batch.logprobs)
        for loss in (
            lambda lp: our_policy_loss(batch, lp, cfg, AGGREGATION_NAMES[aggregation]),
            lambda lp: theirs(lp)[0],
        )
    )
    assert_close(ours, peers, COUNT_EPS)
    at_tokens = ours[batch.mask] == 0
    assert at_tokens.any()
    assert not at_tokens.all()


@pytest.mark.parametrize("aggregation", AGGREGATION_NAMES)
@pytest.mark.parametrize(("low", "high"), CLIPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_cispo(seed: int, low: float, high: float, aggregation: str) -> None:
    batch = random_batch(seed, holes=True)
    cfg = PolicyLossConfig(name="cispo", clip_low=low, clip_high=high)
    theirs = verl_policy_loss("cispo", batch, cfg, aggregation)
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, cfg, AGGREGATION_NAMES[aggregation]),
        lambda lp: theirs(lp)[0],
        batch.logprobs,
        COUNT_EPS,
    )


@pytest.mark.parametrize("aggregation", AGGREGATION_NAMES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_is_verls_gpg_loss(seed: int, weighted: bool, aggregation: str) -> None:
    batch = random_batch(seed, holes=True)
    cfg = PolicyLossConfig(name="reinforce")
    weights = batch.values.exp() if weighted else None
    theirs = verl_policy_loss("gpg", batch, cfg, aggregation, weights)
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, cfg, AGGREGATION_NAMES[aggregation], weights),
        lambda lp: theirs(lp)[0],
        batch.logprobs,
        COUNT_EPS,
    )


@pytest.mark.parametrize(("low", "high"), CLIPS)
@pytest.mark.parametrize("aggregation", AGGREGATION_NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_of_verl_is_gspo_token(seed: int, aggregation: str, low: float, high: float) -> None:
    """Known difference: the loss that verl calls gspo is GSPO-token, with the gradient of each token's own log-prob."""
    batch = random_batch(seed, holes=True)
    cfg = PolicyLossConfig(name="gspo_token", clip_low=low, clip_high=high)
    theirs = verl_policy_loss("gspo", batch, cfg, aggregation)
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, cfg, AGGREGATION_NAMES[aggregation]),
        lambda lp: theirs(lp)[0],
        batch.logprobs,
        COUNT_EPS,
    )


@pytest.mark.parametrize(("low", "high"), CLIPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_of_verl_is_gspo_where_it_is_used(seed: int, low: float, high: float) -> None:
    """With one advantage per row and the aggregation of rows, both forms of GSPO have one gradient."""
    batch = with_row_advantages(random_batch(seed, holes=True))
    cfg = PolicyLossConfig(name="gspo", clip_low=low, clip_high=high)
    theirs = verl_policy_loss("gspo", batch, cfg, "seq-mean-token-mean")
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, cfg, "seq-mean-token-mean"),
        lambda lp: theirs(lp)[0],
        batch.logprobs,
        COUNT_EPS,
    )


@pytest.mark.parametrize(("distance", "ours_at", "verl_at"), [(12.0, 12.0, 10.0), (25.0, 20.0, 10.0)])
def test_gspo_differs_in_its_clamp(distance: float, ours_at: float, verl_at: float) -> None:
    """Known difference: a log-ratio is cut at 20 here, at 10 in verl; where A < 0 no clip hides that."""
    batch = random_batch(0)
    batch = replace(batch, old_logprobs=batch.logprobs - distance, advantages=-torch.ones_like(batch.advantages))
    cfg = PolicyLossConfig(name="gspo_token")
    ours = our_policy_loss(batch, batch.logprobs, cfg, "token-mean")
    theirs, _ = verl_policy_loss("gspo", batch, cfg, "token-mean")(batch.logprobs)
    assert_close(ours.log(), torch.tensor(ours_at), FLOAT64)
    assert_close(theirs.log(), torch.tensor(verl_at), FLOAT64)


@pytest.mark.parametrize(("low", "high"), CLIPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo_is_verls_geo_mean(seed: int, low: float, high: float) -> None:
    """With one advantage per row, as verl wants it; its loss is always a mean over rows."""
    batch = with_row_advantages(random_batch(seed, holes=True))
    cfg = PolicyLossConfig(name="gmpo", clip_low=low, clip_high=high)
    theirs = verl_policy_loss("geo_mean", batch, cfg, "token-mean")
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, cfg, "seq-mean-token-mean"),
        lambda lp: theirs(lp)[0],
        batch.logprobs,
        COUNT_EPS,
    )


@pytest.mark.parametrize(("pos", "neg"), [(1.0, 1.05), (2.0, 0.5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_sapo(seed: int, pos: float, neg: float) -> None:
    """verl's loss is always a mean of rows' means."""
    batch = random_batch(seed, holes=True)
    cfg = PolicyLossConfig(name="sapo", tau_pos=pos, tau_neg=neg)
    theirs = verl_policy_loss("sapo", batch, cfg, "token-mean")
    assert_same_loss(
        lambda lp: our_policy_loss(batch, lp, cfg, "seq-mean-token-mean"),
        lambda lp: theirs(lp)[0],
        batch.logprobs,
        COUNT_EPS,
    )


def our_loss_of_chosen(batch: Batch, cfg: PolicyLossConfig, chosen_by: Tensor) -> Callable[[Tensor], Tensor]:
    """Our loss as a function of the log-probs, with tokens chosen by the covariance of these log-probs."""
    covariance = token_covariance(batch.advantages, chosen_by, batch.mask)
    chosen = choose_tokens(covariance, batch.mask, cfg, uids=batch.uids, seed=0)

    def loss(logprobs: Tensor) -> Tensor:
        x = PolicyLossInputs(
            logprobs=logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.mask,
            chosen=chosen,
        )
        return objective(policy_loss(x, cfg).loss, batch.mask, "token-mean")

    return loss


@pytest.mark.parametrize("share", [0.001, 0.2, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov_of_the_current_log_probs(seed: int, share: float) -> None:
    """verl chooses by current log-probs; on the same choice both losses are equal."""
    batch = random_batch(seed, holes=True)
    cfg = PolicyLossConfig(name="kl_cov", cov_share=share, cov_kl_coef=0.7)
    theirs = verl_policy_loss("kl_cov", batch, cfg, "token-mean")
    ours = our_loss_of_chosen(batch, cfg, batch.logprobs)
    assert_same_loss(ours, lambda lp: theirs(lp)[0], batch.logprobs, COUNT_EPS)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_of_the_current_log_probs_where_no_ratio_is_clipped(seed: int) -> None:
    """All candidates are taken, so no random choice remains. Known difference: verl spares tokens that its clip of
    ratios decides; old log-probs have none.
    """
    batch = random_batch(seed, holes=True)
    cfg = PolicyLossConfig(
        name="clip_cov", clip_low=1.0, clip_high=1e6, cov_share=1.0, cov_low=0.1, cov_high=1.0, dual_clip=None
    )
    theirs = verl_policy_loss("clip_cov", batch, cfg, "token-mean")
    ours = our_loss_of_chosen(batch, cfg, batch.logprobs)
    assert_same_loss(ours, lambda lp: theirs(lp)[0], batch.logprobs, COUNT_EPS)


@pytest.mark.parametrize("seed", SEEDS)
def test_losses_by_covariance_choose_alike_at_the_first_update(seed: int) -> None:
    """Old and current log-probs are equal then. clip_cov has as many tokens left out, at random there and here."""
    batch = random_batch(seed, holes=True)
    batch = replace(batch, old_logprobs=batch.logprobs)
    cfg = PolicyLossConfig(name="clip_cov", cov_share=0.05, cov_low=0.1, cov_high=1.0, dual_clip=None)
    theirs = verl_policy_loss("clip_cov", batch, cfg, "token-mean")
    ours = our_loss_of_chosen(batch, cfg, batch.old_logprobs)
    left_out = [
        int((value_and_gradient(loss, batch.logprobs)[1][batch.mask] == 0).sum())
        for loss in (ours, lambda lp: theirs(lp)[0])
    ]
    assert left_out[0] == left_out[1] == max(int(0.05 * batch.num_tokens), 1)


@pytest.mark.parametrize("clip", [0.2, 1.0, 1e9])
@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed: int, clip: float) -> None:
    batch = random_batch(seed, holes=True)
    rows = RowBatch(
        labels=batch.uids, loss_mask=batch.mask, quantities={"returns": batch.returns, "values": batch.values}
    )
    at = batch.values + batch.advantages
    value_loss = ValueLoss(clip=clip if clip < 1e9 else None)

    def ours(values: Tensor) -> Tensor:
        return value_loss.loss(rows, ValueOutputs(values=values), AlgoState()).objective["tokens"] / batch.num_tokens

    def theirs(values: Tensor) -> Tensor:
        return core_algos.compute_value_loss(values, batch.returns, batch.values, batch.mask.double(), clip)[0]

    assert_same_loss(ours, theirs, at, COUNT_EPS)
    sums = value_loss.loss(rows, ValueOutputs(values=at), AlgoState()).metrics["tokens"]
    _, clipped = core_algos.compute_value_loss(at, batch.returns, batch.values, batch.mask.double(), clip)
    assert_close(sums["critic/vf_clipfrac"] / batch.num_tokens, clipped, FLOAT32)
