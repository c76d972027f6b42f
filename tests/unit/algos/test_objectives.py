"""Objectives that loops name: values by hand, weights per token, and a function of the user."""

import math

import numpy as np
import pytest
import torch

from megarl.algos.build import build_algorithm
from megarl.algos.objectives import ImportanceSampling, OwnObjective, SftAlgorithm, ValueLoss, objective_by_name
from megarl.algos.preference import PreferenceObjective
from megarl.config.algo import AlgoConfig
from megarl.config.schema import TrainPreferenceConfig
from megarl.errors import ConfigError
from megarl.run.session_inputs import weighted_rows
from megarl.types import AlgoState, PolicyOutputs, Row, RowBatch, row_batch

LOGPROBS = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
OUT = PolicyOutputs(logprobs=LOGPROBS, entropy=None)
TOKENS = {"tokens": 2.0}
ROW = Row(
    uid="a",
    sample_index=0,
    token_ids=np.arange(4, dtype=np.int32),
    num_prompt_tokens=1,
    loss_mask=np.array([True, True, False]),
)


def batch(**quantities: list[float]) -> RowBatch:
    """One row of two loss tokens and one outside the mask."""
    padded = {name: torch.tensor([values]) for name, values in quantities.items()}
    return RowBatch(labels=("a/0",), loss_mask=torch.tensor([[True, True, False]]), quantities=padded)


def gradient(loss: torch.Tensor) -> list[float]:
    """By the first two log-probs; that outside the mask must be 0."""
    *inside, outside = torch.autograd.grad(loss, LOGPROBS)[0][0].tolist()
    assert outside == 0
    return inside


def test_weights_of_cross_entropy() -> None:
    plain = SftAlgorithm().loss(batch(), OUT, AlgoState()).total(TOKENS)
    # (1 + 2) / 2.
    assert plain.item() == 1.5
    weighted = SftAlgorithm().loss(batch(correction=[3.0, 0.5, math.nan]), OUT, AlgoState()).total(TOKENS)
    # (3 · 1 + 0.5 · 2) / 2.
    assert weighted.item() == 2.0
    assert gradient(weighted) == [-1.5, -0.25]


def test_importance_sampling() -> None:
    quantities = {"rollout_logprobs": [-1.0 - math.log(2), -2.0, math.nan], "advantages": [1.0, -3.0, math.nan]}
    # Ratios 2 and 1: −(2 · 1 − 1 · 3) / 2.
    sums = ImportanceSampling().loss(batch(**quantities), OUT, AlgoState())
    assert sums.total(TOKENS).item() == pytest.approx(0.5)
    assert gradient(sums.total(TOKENS)) == pytest.approx([-1.0, 1.5])
    assert sums.shares(TOKENS) == {"actor/is_ratio": pytest.approx(1.5)}
    weighted = ImportanceSampling().loss(batch(**quantities, correction=[0.5, 0.0, 1.0]), OUT, AlgoState())
    # −0.5 · 2 · 1 / 2.
    assert weighted.total(TOKENS).item() == pytest.approx(-0.5)


def test_a_function_of_the_user() -> None:
    own = OwnObjective(function=lambda rows, out: out.logprobs.square())
    assert own.denominators([ROW, ROW]) == {"tokens": 4.0}
    # (1 + 4) / 2.
    assert own.loss(batch(), OUT, AlgoState()).total(TOKENS).item() == 2.5
    for function, got in (
        (lambda rows, out: out.logprobs.sum(), r"shape \(\)"),
        (lambda rows, out: out.logprobs.mean(1, keepdim=True), r"shape \(1, 1\)"),
        (lambda rows, out: out.logprobs[0], r"shape \(3,\)"),
        (lambda rows, out: 1.0, "type float"),
    ):
        with pytest.raises(ValueError, match=rf"the loss has {got}, expected \(1, 3\), one for each token; return it"):
            OwnObjective(function=function).loss(batch(), OUT, AlgoState())


def test_weights_and_empty_batches_of_a_function_of_the_user() -> None:
    """A rank without rows has nothing to look up, or to reduce."""
    own = OwnObjective(
        function=lambda rows, out: out.logprobs.square() * rows.quantities["advantages"].amax(1)[:, None]
    )
    assert "correction" in own.reads
    given = batch(advantages=[2.0, 1.0, 0.0], correction=[3.0, 0.5, math.nan])
    # 2 · (3 · 1 + 0.5 · 4) / 2.
    assert own.loss(given, OUT, AlgoState()).total(TOKENS).item() == 5.0
    out = PolicyOutputs(logprobs=torch.zeros(0, 0, requires_grad=True), entropy=None)
    for objective in (own, ImportanceSampling()):
        total = objective.loss(row_batch([], device=torch.device("cpu")), out, AlgoState()).total(TOKENS)
        assert total.item() == 0
        assert torch.autograd.grad(total, out.logprobs)[0].shape == (0, 0)
    assert row_batch([], device=torch.device("cpu")).quantities["advantages"].shape == (0, 0)


@pytest.mark.parametrize(
    ("name", "reads_weights"), [("own", True), ("cross_entropy", True), ("critic", False), ("pairs", False)]
)
def test_weights_reach_an_objective_or_are_refused(name: str, reads_weights: bool) -> None:
    objectives = {
        "own": OwnObjective(function=lambda rows, out: out.logprobs),
        "cross_entropy": SftAlgorithm(),
        "critic": ValueLoss(),
        "pairs": PreferenceObjective(cfg=TrainPreferenceConfig()),
    }
    if reads_weights:
        found = weighted_rows([ROW], [np.array([3.0, 2.0, 1.0])], objectives[name])
        assert found[0].only(objectives[name].reads).quantities["correction"].tolist() == [3.0, 2.0, 1.0]
    else:
        with pytest.raises(ConfigError, match=r"weights: got some for \w+, which reads .*; leave them out, or let"):
            weighted_rows([ROW], [np.ones(3)], objectives[name])


def test_names() -> None:
    own = build_algorithm(AlgoConfig(), max_response_tokens=8)
    assert objective_by_name("algorithm", own) is objective_by_name("ppo_clip", own) is own
    assert objective_by_name("cispo", own).cfg.policy_loss.name == "cispo"
    with pytest.raises(ConfigError, match="unknown objective 'sft'; expected one of: algorithm, bapo, cispo"):
        objective_by_name("sft", own)
    for name in ("score_centering", "dppo_top_tv", "dppo_top_kl"):
        with pytest.raises(ConfigError, match=rf"objective: got '{name}', which reads the distribution .*; use megarl"):
            objective_by_name(name, own)
