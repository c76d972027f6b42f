"""Distillation through the workers of every layout: from samples as k2 in the loss, over the vocabulary as float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.algos.build import build_algorithm
from megarl.config.algo import AdvantageConfig, AlgoConfig, DistillConfig, KLConfig
from megarl.config.schema import LayoutConfig
from megarl.train.forward import with_advantages
from megarl.types import AlgoState, Reward, Row, scored_batch
from megarl.types.messages import Role, RoleSpec, UpdateRequest
from megarl.weights.families import read_model_spec
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.distill_ranks import TEMPERATURE, DistillCase, assembled, teacher_logprobs, update_gradients
from tests.helpers.family_parity import split_rows
from tests.helpers.layout_training import LAYOUTS, Pools, trained_role
from tests.helpers.rows import random_rows

ALONE = AdvantageConfig(estimator="none")
SAMPLED = AlgoConfig(advantage=ALONE, distill=DistillConfig(teacher="model", coef=0.5))
K2 = AlgoConfig(kl=KLConfig(where="loss", estimator="k2", coef=0.5))


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the policies' vocabulary and weights of its own, three layers deep."""
    return make_checkpoint(tmp_path_factory.mktemp("teacher"), tied=True, seed=5, num_layers=4)


def roles_of(student: Path, teacher: Path, layout: LayoutConfig) -> tuple[RoleSpec, ...]:
    actor = trained_role(student, layout, 60)
    # Whole gradients on every replica.
    settings = replace(actor.settings, optimizer=replace(actor.settings.optimizer, distributed=False))
    teaching = trained_role(teacher, layout, 60, role=Role.TEACHER, trainable=False)
    return replace(actor, settings=settings), teaching


def request_of(cfg: AlgoConfig, rows: Sequence[Row]) -> UpdateRequest:
    algorithm = build_algorithm(cfg, max_response_tokens=64)
    return UpdateRequest(
        step=1,
        objective=algorithm,
        state=algorithm.initial_state(),
        denominators=algorithm.denominators(rows),
        temperature=TEMPERATURE,
        lr=1e-3,
    )


def taught_rows() -> list[Row]:
    """Rows of a step without rewards."""
    rows = random_rows([(3, 9), (5, 14), (2, 6), (8, 20)], seed=4)
    algorithm = build_algorithm(SAMPLED, max_response_tokens=64)
    rows = [row.with_quantities(teacher_logprobs=np.zeros(row.num_response_tokens, np.float32)) for row in rows]
    batch = scored_batch(rows, [Reward(score=0.0, correct=False)] * len(rows))
    return with_advantages(rows, algorithm.advantages(batch, AlgoState()))


@pytest.mark.parametrize(
    "name", ["tp2-sp", pytest.param("cp2", marks=pytest.mark.long), pytest.param("dp2", marks=pytest.mark.long)]
)
def test_log_ratios_of_samples_have_the_gradient_of_k2(
    rank_pool: Pools, checkpoint: Callable[..., Path], teacher: Path, name: str
) -> None:
    layout, student = LAYOUTS[name], checkpoint(tied=True)
    rows, pool = taught_rows(), rank_pool(LAYOUTS[name].world_size)
    case = DistillCase(roles=roles_of(student, teacher, layout), rows=rows, micro_batches=split_rows(4, layout.dp))
    said = {i: values for rank in pool.run(teacher_logprobs, case) for i, values in rank.items()}
    rows = [row.with_quantities(teacher_logprobs=said[i], ref_logprobs=said[i]) for i, row in enumerate(rows)]
    case = replace(case, rows=rows, requests=[request_of(cfg, rows) for cfg in (SAMPLED, K2)])
    shapes = read_model_spec(student).expected_tensors()
    by_rank = pool.run(update_gradients, case)
    sampled, k2 = (assembled([rank[i] for rank in by_rank], shapes) for i in range(2))
    assert max(g.abs().max().item() for g in k2.values()) > 1e-3
    error = max((sampled[n] - k2[n]).abs().max().item() for n in k2)
    assert error <= 1e-7, f"max |Δ gradient| is {error:.1e}"
