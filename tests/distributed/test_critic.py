"""A critic trains alike in every layout and split, and as plain torch does it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.algos.objectives import ValueLoss
from megarl.config.schema import LayoutConfig, ModelConfig
from megarl.types import AlgoState, Row, row_from_sample
from megarl.types.messages import Head, Role, RoleSpec, UpdateRequest
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.helpers.checkpoints import add_value_head
from tests.helpers.compare import assert_within
from tests.helpers.critic_ranks import CriticCase, refused_update, run_critic
from tests.helpers.dense_trainer import DenseCritic, DenseStep
from tests.helpers.rank_pool import RankPool
from tests.helpers.replays import ADAM, LEARNING_RATES, Case, alone, merge, planned, row_by_row
from tests.helpers.rollouts import random_rollout

# As for policies.
LOSS_PER_RETURN = 1e-4
GRAD_NORM_RELATIVE = 1e-4
VALUE = 1e-5
WEIGHT = 1e-6

CLIP = 0.2

Pools: TypeAlias = Callable[[int], RankPool]

CASES = {
    "tp1 row by row": Case(layout=LayoutConfig(), plan=row_by_row),
    "tp2": Case(layout=LayoutConfig(tp=2), plan=planned(1)),
    "tp2-sp": Case(layout=LayoutConfig(tp=2, sequence_parallel=True), plan=planned(1)),
    "pp2": Case(layout=LayoutConfig(pp=2), plan=planned(1)),
    "cp2": Case(layout=LayoutConfig(cp=2), plan=planned(1)),
    "dp2": Case(layout=LayoutConfig(dp=2), plan=planned(2)),
    "dp2 plain optimizer": Case(layout=LayoutConfig(dp=2), plan=planned(2), distributed=False),
    "dp2 with a rank without rows": Case(layout=LayoutConfig(dp=2), plan=alone(2)),
    "tp2-sp, full recompute": Case(
        layout=LayoutConfig(tp=2, sequence_parallel=True), plan=planned(1), recompute="full"
    ),
    "pp2 vpp2": Case(layout=LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True), plan=planned(1, multiple=2)),
    "tp2-sp pp2": Case(layout=LayoutConfig(tp=2, sequence_parallel=True, pp=2), plan=planned(1)),
    "tp2-sp cp2": Case(layout=LayoutConfig(tp=2, sequence_parallel=True, cp=2), plan=planned(1)),
    "pp2 dp2": Case(layout=LayoutConfig(pp=2, dp=2), plan=planned(2)),
}
# Plain tp2 and dp2 say no more than tp2-sp and a rank without rows.
SHORT = ("tp1 row by row", "cp2", "dp2 with a rank without rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Metrics, values before the step by row, weights after it."""

    metrics: Mapping[str, float]
    values: list[np.ndarray]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Steps in one layout, and what a forward pass said before them."""

    outputs: list[np.ndarray]
    steps: list[Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A critic, rows with returns and old values, and what plain torch does with them."""

    path: Path
    rows: list[Row]
    dense: list[DenseStep]

    @property
    def loss_atol(self) -> float:
        return LOSS_PER_RETURN * float(np.abs(concatenated(self.rows, "returns")).mean())


def concatenated(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.concatenate([row.quantities[name][row.loss_mask] for row in rows])


@pytest.fixture(scope="module")
def problems(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Problem]:
    """With tied embeddings or not: pytest would make a fixture with parameters anew for every layout."""

    @cache
    def get(tied: bool) -> Problem:
        path = add_value_head(checkpoint(tied=tied, num_layers=4), tmp_path_factory.mktemp("critic"))
        return make_problem(path)

    return get


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def problem(request: pytest.FixtureRequest, problems: Callable[[bool], Problem]) -> Problem:
    return problems(request.param)


def make_problem(path: Path) -> Problem:
    """Returns up to some units away from the values, and old values around both edges of the clip range."""
    critic, rng = DenseCritic(path, ADAM, clip=CLIP), np.random.default_rng(3)
    rows = []
    for row in map(row_from_sample, random_rollout().samples):
        values = critic.values(row).detach().numpy()

        def near(scale: float, values: np.ndarray = values, row: Row = row) -> np.ndarray:
            return np.where(row.loss_mask, values + rng.normal(0, scale, len(values)), 0).astype(np.float32)

        rows.append(row.with_quantities(returns=near(1.0), values=near(0.3)))
    return Problem(path=path, rows=rows, dense=[critic.step(rows, lr) for lr in LEARNING_RATES])


def spec_of(path: Path, case: Case, *, trainable: bool = True) -> RoleSpec:
    return RoleSpec(
        role=Role.CRITIC,
        model=ModelConfig(path=str(path), dtype="float32"),
        settings=case.actor,
        head=Head.SCALAR,
        trainable=trainable,
    )


def critic_case(
    path: Path,
    case: Case,
    rows: Sequence[Row],
    directory: Path,
    *,
    rates: Sequence[float] = LEARNING_RATES,
    clip: float | None = CLIP,
    trainable: bool = True,
) -> CriticCase:
    objective, specs = ValueLoss(clip=clip), weight_specs(read_model_spec(path), "float32", scalar_head=True)
    requests = [
        UpdateRequest(
            role=Role.CRITIC,
            step=step,
            objective=objective,
            state=AlgoState(),
            denominators=objective.denominators(rows),
            temperature=1.0,
            lr=lr,
        )
        for step, lr in enumerate(rates)
    ]
    files = [create_model_files(directory / str(step), specs) for step in range(len(requests))]
    return CriticCase(
        critic=spec_of(path, case, trainable=trainable),
        rows=rows,
        micro_batches=case.plan(rows),
        requests=requests,
        files=[[str(file) for file in names] for names in files],
    )


def run(pools: Pools, case: CriticCase) -> Run:
    layout = case.critic.layout
    outcomes = [o for o in pools(layout.world_size).run(run_critic, case) if o.outputs is not None]
    assert len(outcomes) == layout.dp
    steps = []
    for step, (file,) in enumerate(case.files):
        results = [outcome.updates[step] for outcome in outcomes]
        assert all(result.metrics == results[0].metrics for result in results)
        values = merge([result.before for result in results], len(case.rows))
        steps.append(Step(metrics=results[0].metrics, values=values, weights=load_file(file)))
    outputs = merge([outcome.outputs.quantities["values"] for outcome in outcomes], len(case.rows))
    return Run(outputs=outputs, steps=steps)


def assert_same_steps(got: Run, problem: Problem) -> None:
    """Losses, values, gradient norms and weights of both steps."""
    first = np.concatenate(problem.dense[0].before)
    assert_within("scored values", np.concatenate(got.outputs), first, atol=VALUE)
    for mine, dense in zip(got.steps, problem.dense, strict=True):
        assert_within("values", np.concatenate(mine.values), np.concatenate(dense.before), atol=VALUE)
        for name in ("critic/loss", "critic/vf_loss"):
            assert_within(name, mine.metrics[name], dense.loss, atol=problem.loss_atol)
        atol = GRAD_NORM_RELATIVE * dense.grad_norm
        assert_within("grad norm", mine.metrics["critic/grad_norm"], dense.grad_norm, atol=atol)
        assert mine.weights.keys() == dense.weights.keys()
        errors = {n: (w.double() - dense.weights[n]).abs().max().item() for n, w in mine.weights.items()}
        worst = max(errors, key=errors.__getitem__)
        assert_within(f"weights (worst: {worst})", errors[worst], 0.0, atol=WEIGHT)


# A critic loads tied embeddings in other places than untied ones where they are split and where stages part them.
PAIRS = [
    pytest.param(
        tied,
        name,
        id=f"{'tied' if tied else 'untied'}-{name}",
        marks=() if name in (("tp2-sp", "pp2") if tied else SHORT) else pytest.mark.long,
    )
    for tied in (True, False)
    for name in CASES
]


@pytest.mark.parametrize(("tied", "name"), PAIRS)
def test_every_layout_equals_plain_torch(
    rank_pool: Pools, problems: Callable[[bool], Problem], tmp_path: Path, tied: bool, name: str
) -> None:
    problem = problems(tied)
    case = critic_case(problem.path, CASES[name], problem.rows, tmp_path)
    assert all(len(micro_batches) > 1 for micro_batches in case.micro_batches)
    assert_same_steps(run(rank_pool, case), problem)


def test_the_comparison_is_worth_something(problem: Problem) -> None:
    """Gradients are clipped, some tokens' values too, and a step moves weights by much more than the tolerance."""
    assert all(dense.grad_norm > 1.2 * ADAM.clip_grad_norm for dense in problem.dense)
    assert all(dense.loss > 1000 * problem.loss_atol for dense in problem.dense)
    values, old, returns = (
        np.concatenate(
            [dense[row.loss_mask] for dense, row in zip(problem.dense[0].before, problem.rows, strict=True)]
        ),
        concatenated(problem.rows, "values"),
        concatenated(problem.rows, "returns"),
    )
    near_old = np.clip(values, old - CLIP, old + CLIP)
    clipped = (near_old - returns) ** 2 > (values - returns) ** 2
    assert 0.1 < clipped.mean() < 0.9
    for name in ("score.weight", "model.norm.weight", "model.embed_tokens.weight"):
        moved = problem.dense[1].weights[name] - problem.dense[0].weights[name]
        assert moved.abs().max() > 30 * WEIGHT


def test_a_language_models_critic_starts_at_zero_and_learns_a_fixed_target(
    rank_pool: Pools, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [row_from_sample(sample) for sample in random_rollout().samples]
    rows = [row.with_quantities(returns=np.where(row.loss_mask, np.float32(1.5), np.float32(0))) for row in rows]
    path = checkpoint(tied=True, num_layers=4)
    case = critic_case(path, CASES["tp2-sp"], rows, tmp_path, rates=(1e-2,) * 6, clip=None)
    got = run(rank_pool, case)
    assert not np.concatenate(got.outputs).any()
    losses = [step.metrics["critic/loss"] for step in got.steps]
    # v = 0: ½·1.5² on every token.
    assert losses[0] == pytest.approx(1.125)
    assert losses[-1] < 0.5 * losses[0]
    # While the head is 0 no gradient passes it.
    before, after = load_file(path / "model.safetensors"), got.steps[0].weights
    assert after["score.weight"].abs().min() > 0
    # Adam does not move what has no gradient; decay does.
    decay = 1 - 1e-2 * ADAM.weight_decay
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.allclose(after[name], before[name] * decay, atol=1e-7)
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.long
def test_a_frozen_critic_computes_values_and_is_not_updated(rank_pool: Pools, problem: Problem, tmp_path: Path) -> None:
    case = critic_case(problem.path, CASES["tp2-sp"], problem.rows, tmp_path, trainable=False)
    outputs = run(rank_pool, replace(case, requests=(), files=())).outputs
    assert_within("values", np.concatenate(outputs), np.concatenate(problem.dense[0].before), atol=VALUE)
    assert set(rank_pool(2).run(refused_update, case)) == {"the critic is frozen"}
    before = load_file(problem.path / "model.safetensors")
    after = load_file(case.files[0][0])
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
