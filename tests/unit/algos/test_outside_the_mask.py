"""What lies outside the loss mask, whatever it is, changes no value and no gradient."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algos import build_algorithm, cpo
from megarl.algos.advantages import ADVANTAGE_ESTIMATORS
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.corrections import CORRECTIONS
from megarl.algos.cpo.methods import CPO_METHODS
from megarl.algos.kl import KL_ESTIMATORS
from megarl.algos.masked import masked_sum
from megarl.algos.objectives import SftAlgorithm, ValueLoss
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossInputs, policy_loss
from megarl.algos.preference import BATCH_KL, PREFERENCE_LOSSES, BradleyTerry, PreferenceObjective
from megarl.algos.reshape import DEMONSTRATION_RESHAPES
from megarl.config.algo import (
    AdvantageConfig,
    AlgoConfig,
    CorrectionConfig,
    CpoConfig,
    DemonstrationConfig,
    DistillConfig,
    KLConfig,
    OffPolicyConfig,
    PolicyLossConfig,
)
from megarl.config.schema import TrainPreferenceConfig
from megarl.types import AlgoState, PolicyOutputs, RowBatch, TokenQuantity, ValueOutputs
from tests.helpers.steps import MAX_RESPONSE_TOKENS, VOCAB_SIZE, outcome_of, random_step

# 1e200 overflows in float64 as 1e30 does in float32.
KINDS = (math.nan, 1e200, math.inf, -1e200, -math.inf)


def garbage(shape: torch.Size) -> Tensor:
    """Every kind in turn."""
    values = torch.tensor(KINDS, dtype=torch.float64)
    return values.repeat(-(-shape.numel() // len(KINDS)))[: shape.numel()].reshape(shape)


GIVEN = DemonstrationConfig(strategy="linear_max")
LOSS_ESTIMATORS = [name for name in KL_ESTIMATORS if KL_ESTIMATORS.get(name).refused_in_loss is None]


def policy_loss_config(name: str) -> AlgoConfig:
    return AlgoConfig(
        policy_loss=PolicyLossConfig(name=name),
        correction=CorrectionConfig(name="rollout_ratio" if name == "bapo" or "_top_" in name else "none"),
        aggregation="seq-mean-token-mean" if POLICY_LOSSES.get(name).row_ratio else "token-mean",
    )


def configs() -> Iterator[tuple[str, AlgoConfig]]:
    """Every registered part, in a composition that reads it."""
    for name in POLICY_LOSSES:
        yield f"policy_loss={name}", policy_loss_config(name)
    for name in AGGREGATIONS:
        yield f"aggregation={name}", AlgoConfig(aggregation=name, entropy_coef=0.1)
    for name in LOSS_ESTIMATORS:
        yield f"kl in the loss={name}", AlgoConfig(kl=KLConfig(where="loss", estimator=name, coef=0.1))
    for name in KL_ESTIMATORS:
        yield f"kl in the reward={name}", AlgoConfig(kl=KLConfig(where="reward", estimator=name, coef=0.1))
    for name in CORRECTIONS:
        yield f"correction={name}", AlgoConfig(correction=CorrectionConfig(name=name))
    for name in ADVANTAGE_ESTIMATORS:
        # Without rewards, a teacher trains.
        if name not in ("critic_value", "maxrl", "none"):
            options: dict[str, Any] = {"gdpo": {"components": {"score": 1.0}}, "passk": {"k": 2}}.get(name, {})
            cfg = AdvantageConfig(estimator=name, **options)
            yield f"estimator={name}", AlgoConfig(advantage=cfg)
    taught = DistillConfig(teacher="model")
    yield "distill=sampled", AlgoConfig(advantage=AdvantageConfig(estimator="none"), distill=taught)
    for name in CPO_METHODS:
        cfg = CpoConfig(method=name)
        yield f"cpo={name}", AlgoConfig(cpo=cfg)
        if cpo.required_quantities(cfg) & {TokenQuantity.OLD_ENTROPY}:
            yield f"cpo={name} in the loss", AlgoConfig(cpo=replace(cfg, entropy_source="current"))
    for name in DEMONSTRATION_RESHAPES:
        reshape = "p_div_p_0.1" if name == "p_div_p" else name
        yield (
            f"luffy={name}",
            AlgoConfig(off_policy=OffPolicyConfig(loss="luffy", reshape=reshape), demonstrations=GIVEN),
        )
    yield "highest entropies", AlgoConfig(high_entropy_share=0.4)
    yield "imitation", AlgoConfig(off_policy=OffPolicyConfig(loss="sft"), demonstrations=GIVEN)


@pytest.mark.parametrize(("name", "cfg"), [pytest.param(*each, id=each[0]) for each in configs()])
def test_a_composition(name: str, cfg: AlgoConfig) -> None:
    # Some rows have no loss token at all.
    step = random_step([3, 4], 20, demonstrations=cfg.demonstrations.strategy != "none")
    assert not step.batch.loss_mask.any(-1).all()
    algo = build_algorithm(cfg, max_response_tokens=MAX_RESPONSE_TOKENS, vocab_size=VOCAB_SIZE)
    expected = outcome_of(algo, step)
    assert expected.logprobs_grad.abs().sum() > 0
    mask = step.batch.loss_mask
    noise = garbage(mask.shape)
    got = outcome_of(algo, step.columns(lambda x: x if x is mask else torch.where(mask, x, noise)))
    assert got.loss == expected.loss
    assert torch.equal(got.logprobs_grad, expected.logprobs_grad)
    assert torch.equal(got.entropy_grad, expected.entropy_grad)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-12, abs=1e-12)


MASK = torch.tensor([[True, True, False, True], [False, True, True, False], [False] * 4, [True, False, False, False]])


def numbers(seed: int, low: float = -3.0, high: float = 0.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(MASK.shape, generator=g, dtype=torch.float64)


def spoiled(values: Tensor, fill: Tensor) -> Tensor:
    return torch.where(MASK, values, fill)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_policy_loss_by_itself(name: str) -> None:
    """As its registry gives it, and with weights of a correction."""

    def outcome(fill: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = spoiled(numbers(1), fill).requires_grad_()
        x = PolicyLossInputs(
            logprobs=logprobs,
            old_logprobs=spoiled(numbers(1) + numbers(2, -0.1, 0.1), fill),
            advantages=spoiled(numbers(3, -1, 1), fill),
            loss_mask=MASK,
            chosen=numbers(4) > -1,
            clip_bounds=spoiled(numbers(6, 0.8, 1.2), fill),
            rollout_logprobs=spoiled(numbers(6), fill),
            beside=spoiled(numbers(7), fill),
            ref_logprobs=spoiled(numbers(8), fill),
            log_z=spoiled(numbers(9), fill),
        )
        cfg = PolicyLossConfig(name=name)
        weighted = policy_loss(replace(x, correction=spoiled(numbers(5, 0, 2), fill)), cfg)
        loss = masked_sum(POLICY_LOSSES.get(name).compute(x, cfg).loss, MASK) + masked_sum(weighted.loss, MASK)
        loss.backward()
        assert logprobs.grad is not None
        return loss.detach(), logprobs.grad

    got, expected = outcome(garbage(MASK.shape)), outcome(torch.zeros(MASK.shape, dtype=torch.float64))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert got[1].abs().sum() > 0


def objectives() -> Iterator[Any]:
    for name in PREFERENCE_LOSSES:
        yield pytest.param(PreferenceObjective(cfg=TrainPreferenceConfig(objective=name)), id=name)
    yield pytest.param(BradleyTerry(), id="reward model")
    yield pytest.param(SftAlgorithm(), id="sft")
    yield pytest.param(ValueLoss(clip=0.2), id="critic")
    yield pytest.param(ValueLoss(), id="critic without clip")


@pytest.mark.parametrize("objective", objectives())
def test_an_objective_without_advantages(objective: Any) -> None:
    def outcome(fill: Tensor) -> tuple[dict[str, float], Tensor]:
        predicted = spoiled(numbers(1), fill).requires_grad_()
        quantities = {name: spoiled(numbers(len(name)), fill) for name in objective.reads if name != BATCH_KL}
        if BATCH_KL in objective.reads:
            quantities[BATCH_KL] = spoiled(torch.full(MASK.shape, 0.25, dtype=torch.float64), fill)
        rows = RowBatch(labels=("q/0", "q/1", "q/2", "q/3"), loss_mask=MASK, quantities=quantities)
        is_policy = isinstance(objective, PreferenceObjective | SftAlgorithm)
        out = PolicyOutputs(logprobs=predicted, entropy=None) if is_policy else ValueOutputs(values=predicted)
        sums = objective.loss(rows, out, AlgoState())
        sum(sums.objective.values()).backward()
        assert predicted.grad is not None
        values = {**sums.objective, **{name: v for part in sums.metrics.values() for name, v in part.items()}}
        return {name: value.item() for name, value in values.items()}, predicted.grad

    got, expected = outcome(garbage(MASK.shape)), outcome(torch.zeros(MASK.shape, dtype=torch.float64))
    assert got[0] == expected[0]
    assert torch.equal(got[1], expected[1])
    assert got[1].abs().sum() > 0
