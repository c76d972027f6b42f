"""Advantages, corrections and losses against TRL."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algos.composed import ComposedAlgorithm
from megarl.algos.kl import KL_ESTIMATORS
from megarl.algos.masked import group_stats
from megarl.config.algo import AdvantageConfig, AlgoConfig, CorrectionConfig, KLConfig, PolicyLossConfig
from megarl.types import PolicyOutputs, Row, RowBatch
from tests.conformance.batches import (
    HORIZON_TOKENS,
    SEEDS,
    Batch,
    group_order,
    near_reference,
    our_advantages,
    our_correction,
    random_batch,
    reordered,
    with_empty_rows,
    with_row_advantages,
)
from tests.conformance.compare import FLOAT32, FLOAT64, assert_close, assert_same_loss
from tests.conformance.peer_trl import Grpo, Rloo

# TRL knows one size of groups, whose rows lie side by side.
GROUPS = (4, 4, 4)
STD_EPS, TRL_STD_EPS = 1e-6, 1e-4


def grouped_batch(seed: int, group_sizes: tuple[int, ...] = GROUPS) -> Batch:
    batch = random_batch(seed, group_sizes=group_sizes)
    return reordered(batch, group_order(batch.uids))


def per_row(advantages: Tensor, batch: Batch) -> Tensor:
    """[B] from [B, T] that is one number on every loss token of a row."""
    assert_close(torch.where(batch.mask, advantages[:, :1], 0.0), advantages, 0.0)
    return advantages[:, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_advantages_differ_in_eps(seed: int) -> None:
    """Known difference: (r − mean) / (std + 1e-6) here, + 1e-4 in TRL; both unbiased, TRL's n / (n − 1) in float32."""
    batch = grouped_batch(seed)
    std = group_stats(batch.rewards, batch.uids).std
    ours = per_row(our_advantages(batch, AdvantageConfig(estimator="grpo")), batch)
    theirs = Grpo(batch, scale_rewards="group").scored()["advantages"]
    assert_close(ours * (std + STD_EPS), theirs * (std + TRL_STD_EPS), FLOAT32)


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_without_scale(seed: int) -> None:
    batch = grouped_batch(seed)
    ours = per_row(our_advantages(batch, AdvantageConfig(estimator="dr_grpo")), batch)
    assert_close(ours, Grpo(batch, scale_rewards="none").scored()["advantages"], FLOAT64)


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_advantages_with_kl_in_the_reward(seed: int, kl_coef: float) -> None:
    batch = grouped_batch(seed)
    penalty = kl_coef * KL_ESTIMATORS.get("k1").compute(batch.old_logprobs, batch.ref_logprobs)
    ours = per_row(our_advantages(batch, AdvantageConfig(estimator="rloo"), kl_penalty=penalty), batch)
    assert_close(ours, Rloo(batch, beta=kl_coef).scored()["advantages"], FLOAT64)


@pytest.mark.parametrize(("estimator", "trainer"), [("grpo", Grpo), ("rloo", Rloo)])
def test_groups_of_one_differ(estimator: str, trainer: Callable[..., Any]) -> None:
    """Known difference: a group of one has advantage 0 in TRL; here its reward, by GRPO over 1 + 1e-6."""
    batch = grouped_batch(0, (1,) * 5)
    ours = per_row(our_advantages(batch, AdvantageConfig(estimator=estimator)), batch)
    theirs = trainer(batch, scale_rewards="group").scored()["advantages"]
    assert_close(theirs, torch.zeros_like(theirs), 0.0)
    assert_close(ours, batch.rewards / (1 + STD_EPS if estimator == "grpo" else 1), FLOAT64)


# Our correction, TRL's mode and bounds.
ENGINE_WEIGHTS = [
    (CorrectionConfig(name="tis", low=0.5, high=2.0), "token_truncate", 0.5),
    (CorrectionConfig(name="tis_upper", high=2.0), "token_truncate", None),
    (CorrectionConfig(name="icepop", low=0.5, high=2.0), "token_mask", 0.5),
    (CorrectionConfig(name="sequence", high=2.0), "sequence_truncate", None),
]


@pytest.mark.parametrize(("cfg", "mode", "low"), ENGINE_WEIGHTS, ids=[case[0].name for case in ENGINE_WEIGHTS])
@pytest.mark.parametrize("seed", SEEDS)
def test_weights_for_the_engines_logprobs(seed: int, cfg: CorrectionConfig, mode: str, low: float | None) -> None:
    batch = grouped_batch(seed)
    trainer = Grpo(
        batch,
        scale_rewards="group",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=cfg.high,
    )
    theirs = trainer.scored()["importance_sampling_ratio"].expand_as(batch.mask)
    assert_close(our_correction(batch, cfg).weights, torch.where(batch.mask, theirs, 0.0), FLOAT32)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mask_of_off_policy_rows(seed: int) -> None:
    batch = with_row_advantages(random_batch(seed, holes=True))
    cfg = CorrectionConfig(name="sequence_mask", max_kl_nats=0.1, only_negative=True)
    theirs = Grpo.get_off_policy_mask(
        batch.advantages[:, :1], batch.old_logprobs, batch.rollout_logprobs, batch.mask.double(), cfg.max_kl_nats
    )
    assert len(theirs.unique()) == 2
    assert torch.equal(our_correction(batch, cfg).accepted, theirs.bool() & batch.mask)


# --- losses


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """TRL's settings, and the policy loss and aggregation that they are here."""

    trl: dict[str, Any]
    aggregation: str
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(dual_clip=None))


CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
PPO = PolicyLossConfig(clip_low=0.2, clip_high=0.28, dual_clip=None)
LOSS_CASES = {
    "grpo": LossCase(trl=CLIP | {"loss_type": "grpo"}, aggregation="seq-mean-token-mean", loss=PPO),
    "bnpo": LossCase(trl=CLIP | {"loss_type": "bnpo"}, aggregation="token-mean", loss=PPO),
    "dapo": LossCase(trl=CLIP | {"loss_type": "dapo"}, aggregation="token-mean", loss=PPO),
    "dr_grpo": LossCase(trl=CLIP | {"loss_type": "dr_grpo"}, aggregation="dr_grpo", loss=PPO),
    "luspo by token": LossCase(trl=CLIP | {"loss_type": "luspo"}, aggregation="seq-mean-token-sum", loss=PPO),
    "two-sided clip is the dual clip": LossCase(
        trl=CLIP | {"loss_type": "bnpo", "delta": 1.5}, aggregation="token-mean", loss=replace(PPO, dual_clip=1.5)
    ),
    "gspo": LossCase(
        trl={"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.01},
        aggregation="seq-mean-token-mean",
        loss=PolicyLossConfig(name="gspo", clip_low=0.01, clip_high=0.01),
    ),
    # TRL bounds the ratio itself, from above only: 1 + clip_high, and a clip_low that reaches 0.
    "cispo": LossCase(
        trl={"loss_type": "cispo", "epsilon_high": 1.5},
        aggregation="token-mean",
        loss=PolicyLossConfig(name="cispo", clip_low=1.0, clip_high=0.5),
    ),
}
TOKEN_MEANS = [name for name, case in LOSS_CASES.items() if case.aggregation == "token-mean"]


def trl_trainer(batch: Batch, case: LossCase, **settings: Any) -> Grpo:
    options = dict(case.trl)
    trainer = Grpo(batch, **settings)
    trainer.args = SimpleNamespace(**vars(trainer.args) | {"delta": options.pop("delta", None)})
    for name, value in options.items():
        setattr(trainer, name, value)
    return trainer


def our_loss(
    batch: Batch, case: LossCase, *, kl_coef: float = 0.0, entropy_coef: float = 0.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """The composed objective of (logprobs, entropy)."""
    kl = KLConfig(where="loss" if kl_coef else "none", estimator="k3", coef=kl_coef)
    cfg = AlgoConfig(policy_loss=case.loss, aggregation=case.aggregation, kl=kl, entropy_coef=entropy_coef)
    algorithm = ComposedAlgorithm(cfg=cfg, horizon_tokens=HORIZON_TOKENS, max_response_tokens=HORIZON_TOKENS)
    quantities = {
        "advantages": batch.advantages,
        "old_logprobs": batch.old_logprobs,
        "ref_logprobs": batch.ref_logprobs,
    }
    rows = RowBatch(labels=batch.uids, loss_mask=batch.mask, quantities=quantities)
    counted = [
        Row(uid=uid, sample_index=i, token_ids=np.zeros(len(mask) + 1, np.int64), num_prompt_tokens=1, loss_mask=mask)
        for i, (uid, mask) in enumerate(zip(batch.uids, batch.mask.numpy(), strict=True))
    ]
    denominators = algorithm.denominators(counted)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        out = PolicyOutputs(logprobs=logprobs, entropy=entropy)
        return algorithm.loss(rows, out, algorithm.initial_state()).total(denominators)

    return loss


def entropy_of(logprobs: Tensor) -> Tensor:
    """An entropy per token with a gradient: that of a coin that shows the token."""
    p = logprobs.exp().clamp(1e-9, 1 - 1e-9)
    return -(p * p.log() + (1 - p) * (1 - p).log())


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("name", LOSS_CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_losses(seed: int, name: str, kl_coef: float) -> None:
    batch, case = near_reference(random_batch(seed, holes=True)), LOSS_CASES[name]
    ours, theirs = our_loss(batch, case, kl_coef=kl_coef), trl_trainer(batch, case, beta=kl_coef)
    assert_same_loss(lambda lp: ours(lp, entropy_of(lp)), theirs.loss, batch.logprobs, FLOAT64)


@pytest.mark.parametrize("name", LOSS_CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_without_loss_tokens_differ(seed: int, name: str) -> None:
    """Known difference: where a loss is divided by rows, TRL counts those without loss tokens, we do not."""
    batch, case = with_empty_rows(random_batch(seed)), LOSS_CASES[name]
    scale = 1.0 if name in TOKEN_MEANS else len(batch.uids) / batch.num_rows
    ours, theirs = our_loss(batch, case), trl_trainer(batch, case)
    assert_same_loss(lambda lp: ours(lp, entropy_of(lp)), lambda lp: scale * theirs.loss(lp), batch.logprobs, FLOAT64)


@pytest.mark.parametrize("name", LOSS_CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_entropy_bonus_differs_in_its_aggregation(seed: int, name: str) -> None:
    """Known difference: a token mean in TRL; here the aggregation of the policy loss, which may be the same."""
    batch, case, coef = random_batch(seed, holes=True), LOSS_CASES[name], 0.3
    trainer = trl_trainer(batch, case, _entropy_bonus_enabled=True, entropy_coef=coef)
    without, with_bonus = our_loss(batch, case), our_loss(batch, case, entropy_coef=coef)

    def theirs(logprobs: Tensor) -> Tensor:
        return trainer.loss(logprobs, entropy_of(logprobs))

    def token_mean(logprobs: Tensor) -> Tensor:
        return without(logprobs, entropy_of(logprobs)) - coef * entropy_of(logprobs)[batch.mask].mean()

    assert_same_loss(token_mean, theirs, batch.logprobs, FLOAT64)
    if name in TOKEN_MEANS:
        assert_same_loss(lambda lp: with_bonus(lp, entropy_of(lp)), theirs, batch.logprobs, FLOAT64)


def test_kl_far_from_the_reference_differs() -> None:
    """Known difference: TRL's k3 has no bound; ours is cut at 10, so that one token does not decide the batch."""
    batch = random_batch(0)
    batch = replace(batch, ref_logprobs=batch.logprobs + 4.0, advantages=torch.zeros_like(batch.advantages))
    case = LOSS_CASES["bnpo"]
    ours = our_loss(batch, case, kl_coef=1.0)(batch.logprobs, entropy_of(batch.logprobs))
    theirs = trl_trainer(batch, case, beta=1.0).loss(batch.logprobs)
    assert_close(ours, torch.tensor(10.0), FLOAT64)
    assert_close(theirs, torch.tensor(4.0, dtype=torch.float64).exp() - 5, FLOAT64)
