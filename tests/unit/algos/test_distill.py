"""On-policy distillation from samples: its gradient, what it needs, and where log-ratios are added."""

from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.build import algorithm_of, build_algorithm
from megarl.config import Config, from_dict
from megarl.config.algo import AdvantageConfig, AlgoConfig, CorrectionConfig, DistillConfig, KLConfig
from megarl.errors import ConfigError
from megarl.train.forward import with_advantages
from megarl.types import PolicyOutputs, Reward, Row, TokenQuantity, row_batch, scored_batch
from tests.helpers.rows import random_rows

ALONE = AdvantageConfig(estimator="none")
SAMPLED = AlgoConfig(advantage=ALONE, distill=DistillConfig(teacher="model", coef=0.5))
REWARDS = [Reward(score=0.0, correct=False)] * 3


def step_gradient(cfg: AlgoConfig, rows: list[Row], logprobs: list[np.ndarray]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The gradient by the current log-probs of one step on rows, from their advantages on; and metrics."""
    algorithm = build_algorithm(cfg, max_response_tokens=64)
    found = algorithm.advantages(scored_batch(rows, REWARDS), algorithm.initial_state())
    rows = with_advantages(rows, found)
    batch = row_batch([row.only(algorithm.reads) for row in rows], device=torch.device("cpu"))
    x = torch.zeros(batch.loss_mask.shape)
    for i, row in enumerate(rows):
        x[i, : row.num_response_tokens] = torch.from_numpy(logprobs[i])
    x.requires_grad_()
    outputs = PolicyOutputs(logprobs=x, entropy=torch.zeros_like(x))
    loss = algorithm.loss(batch, outputs, algorithm.initial_state())
    loss.total(algorithm.denominators(rows)).backward()
    assert x.grad is not None
    return x.grad, {**found.metrics, **loss.shares(algorithm.denominators(rows))}


@pytest.fixture
def logprobs() -> tuple[list[Row], list[np.ndarray], list[np.ndarray]]:
    """Rows, and log-probs of their tokens by student and teacher."""
    rows = random_rows([(4, 6), (2, 9), (7, 3)])
    rng = np.random.default_rng(0)
    student, teacher = ([-3 * rng.random(row.num_response_tokens).astype(np.float32) for row in rows] for _ in range(2))
    return rows, student, teacher


@pytest.mark.parametrize("scored", [False, True])
def test_log_ratios_have_the_gradient_of_k2(logprobs: Any, scored: bool) -> None:
    rows, student, teacher = logprobs
    if scored:
        rows = [row.with_quantities(old_logprobs=s) for row, s in zip(rows, student, strict=True)]
    zipped = list(zip(rows, teacher, strict=True))
    oracle = AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=0.5))
    expected, _ = step_gradient(oracle, [row.with_quantities(ref_logprobs=t) for row, t in zipped], student)
    taught = [row.with_quantities(teacher_logprobs=t, teacher_entropy=np.abs(t)) for row, t in zipped]
    found, metrics = step_gradient(SAMPLED, taught, student)
    assert (found - expected).abs().max() <= 1e-7 < 1e-2 < expected.abs().max()
    mask = np.concatenate([row.loss_mask for row in rows])
    difference = np.concatenate(student) - np.concatenate(teacher)
    assert metrics["distill/reverse_kl"] == pytest.approx(difference[mask].mean(), abs=1e-6)
    assert metrics["distill/teacher_entropy"] == pytest.approx(-np.concatenate(teacher)[mask].mean(), abs=1e-6)


def test_a_discount_adds_the_log_ratios_of_later_tokens(logprobs: Any) -> None:
    rows, student, teacher = logprobs
    taught = [row.with_quantities(teacher_logprobs=t) for row, t in zip(rows, teacher, strict=True)]
    cfg = AlgoConfig(advantage=ALONE, distill=DistillConfig(teacher="model", discount=0.5))
    assert not build_algorithm(cfg, max_response_tokens=64).token_local
    found, _ = step_gradient(cfg, taught, student)
    num_tokens = sum(row.num_loss_tokens for row in rows)
    for i, row in enumerate(rows):
        later = 0.0
        for t in reversed(np.flatnonzero(row.loss_mask)):
            later = teacher[i][t] - student[i][t] + 0.5 * later
            assert found[i, t].item() == pytest.approx(-later / num_tokens, abs=1e-6)


def test_stale_samples_are_corrected_and_those_of_a_ratio_to_the_engine_compared_with_it(logprobs: Any) -> None:
    rows, student, teacher = logprobs
    rows = [
        row.with_quantities(rollout_logprobs=s, teacher_logprobs=t)
        for row, s, t in zip(rows, student, teacher, strict=True)
    ]
    cfg = AlgoConfig(
        advantage=ALONE, distill=DistillConfig(teacher="model"), correction=CorrectionConfig(name="rollout_ratio")
    )
    moved = [s + np.float32(0.1) for s in student]
    found, _ = step_gradient(cfg, rows, moved)
    num_tokens = sum(row.num_loss_tokens for row in rows)
    ratio = np.exp(np.float32(0.1))
    for i, row in enumerate(rows):
        advantage = teacher[i] - student[i]
        # Clipped at 1.2, and 1.105 is below.
        expected = np.where(row.loss_mask, -ratio * advantage / num_tokens, 0)
        np.testing.assert_allclose(found[i, : row.num_response_tokens].numpy(), expected, atol=1e-6)


def test_a_teacher_is_asked_for_log_probs_of_samples_alone() -> None:
    assert build_algorithm(SAMPLED, max_response_tokens=8).requires() == {TokenQuantity.TEACHER_LOGPROBS}
    exact = AlgoConfig(advantage=ALONE, distill=DistillConfig(teacher="model", mode="exact"))
    assert build_algorithm(exact, max_response_tokens=8).requires() == set()
    assert build_algorithm(AlgoConfig(), max_response_tokens=8).requires() == set()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"distill": {"coef": 2.0}},
            "algo.distill.coef: got 2.0, which is not read with algo.distill.teacher=none; leave it at 1.0, or set",
        ),
        (
            {"distill": {"teacher": "model", "divergence": "forward"}},
            "algo.distill.divergence: got forward, which is not read with algo.distill.mode=sampled; leave it at",
        ),
        (
            {"distill": {"teacher": "model", "exclude_answer": True}},
            "algo.distill.exclude_answer: got true, which is not read with algo.distill.teacher=model; leave it at",
        ),
        (
            {"distill": {"teacher": "hint", "mode": "topk", "shuffled_baseline": True}},
            "algo.distill.shuffled_baseline: got true, which is not read with algo.distill.mode=topk; leave it at",
        ),
        ({"advantage": {"estimator": "none"}}, "algo.advantage.estimator: got 'none' with algo.distill.teacher=none"),
        ({"advantage": {"estimator": "grpo"}, "distill": {"teacher": "model"}}, "rewards.manager: got none"),
        (
            {"advantage": {"estimator": "none"}, "distill": {"teacher": "model"}, "kl": {"where": "reward"}},
            "algo.kl.where: got 'reward' with algo.advantage.estimator=none, which reads no rewards",
        ),
        (
            {"advantage": {"estimator": "none"}, "distill": {"teacher": "model"}, "reward": {"truncated": 0.5}},
            "algo.reward.truncated: got 0.5, which is not read with algo.advantage.estimator=none",
        ),
    ],
)
def test_settings_that_nothing_reads_are_refused(tree: dict[str, Any], message: str) -> None:
    config = from_dict(Config, {"algo": tree, "rewards": {"manager": "none"}, "rollout": {"num_samples": 4}})
    with pytest.raises(ConfigError, match=message):
        algorithm_of(config)
