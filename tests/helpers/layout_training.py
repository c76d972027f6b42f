"""What tests of supervised training share: layouts, tolerances, two steps of one role, and their comparison."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import load_file

from megarl.config.schema import ActorConfig, LayoutConfig, ModelConfig, OptimizerConfig
from megarl.train.passes import CountedObjective
from megarl.types import AlgoState, Row
from megarl.types.messages import Head, Role, RoleSpec, UpdateRequest
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import create_model_files, weight_specs
from tests.helpers.compare import assert_within
from tests.helpers.critic_ranks import CriticCase, run_critic
from tests.helpers.dense_trainer import DenseStep
from tests.helpers.rank_pool import RankPool
from tests.helpers.replay_checks import GRAD_NORM_RELATIVE, assert_same_weights
from tests.helpers.replays import ADAM, LEARNING_RATES

LOSS = 1e-5
# Of log-probs in nats, and of a reward model's scores.
OUTPUT = 1e-5

Pools: TypeAlias = Callable[[int], RankPool]

LAYOUTS = {
    "tp1": LayoutConfig(),
    "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True),
    # Two ranks share a key/value head.
    "tp4-sp": LayoutConfig(tp=4, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2),
    "cp2": LayoutConfig(cp=2),
    "dp2": LayoutConfig(dp=2),
    "tp2-sp cp2": LayoutConfig(tp=2, sequence_parallel=True, cp=2),
    "pp2 dp2": LayoutConfig(pp=2, dp=2),
}


def trained_role(
    path: Path,
    layout: LayoutConfig,
    tokens: int,
    *,
    role: Role = Role.ACTOR,
    head: Head = Head.LM,
    trainable: bool = True,
) -> RoleSpec:
    """A role in float32, with the optimizer `ADAM` and micro-batches of up to `tokens` tokens."""
    optimizer = OptimizerConfig(
        betas=ADAM.betas, eps=ADAM.eps, weight_decay=ADAM.weight_decay, clip_grad_norm=ADAM.clip_grad_norm
    )
    settings = ActorConfig(layout=layout, optimizer=optimizer, micro_batch_tokens=tokens)
    model = ModelConfig(path=str(path), dtype="float32")
    return RoleSpec(role=role, model=model, settings=settings, head=head, trainable=trainable)


def update_requests(objective: CountedObjective, rows: Sequence[Row]) -> list[UpdateRequest]:
    """An actor's steps on the same rows; `training_case` sets their rates."""
    denominators = objective.denominators(rows)
    return [
        UpdateRequest(
            step=step, objective=objective, state=AlgoState(), denominators=denominators, temperature=1.0, lr=0.0
        )
        for step in range(len(LEARNING_RATES))
    ]


def training_case(
    spec: RoleSpec,
    rows: Sequence[Row],
    micro_batches: Sequence[Sequence[Sequence[int]]],
    requests: Sequence[UpdateRequest],
    directory: Path,
) -> CriticCase:
    """One step at each of `LEARNING_RATES`, and files for the weights after each."""
    specs = weight_specs(read_model_spec(spec.model.path), "float32", scalar_head=spec.head is Head.SCALAR)
    return CriticCase(
        critic=spec,
        rows=rows,
        micro_batches=micro_batches,
        requests=[replace(request, lr=lr) for request, lr in zip(requests, LEARNING_RATES, strict=True)],
        files=[[str(file) for file in create_model_files(directory / str(i), specs)] for i in range(len(requests))],
    )


def run_training(pools: Pools, case: CriticCase) -> list[Any]:
    """Run the case in its layout; a `CriticOutcome` of each rank that reports, of which a replica has one."""
    layout = case.critic.layout
    outcomes = [o for o in pools(layout.world_size).run(run_critic, case) if o.outputs is not None]
    assert len(outcomes) == layout.dp
    return outcomes


def assert_same_grad_norm(got: float, step: DenseStep) -> None:
    assert_within("grad norm", got, step.grad_norm, atol=GRAD_NORM_RELATIVE * step.grad_norm)


def assert_same_files(files: Sequence[str], step: DenseStep) -> None:
    """The one file of a step has the weights of plain torch after it."""
    (file,) = files
    assert_same_weights(load_file(file), step.weights)
