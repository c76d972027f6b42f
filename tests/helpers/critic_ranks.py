"""What the tests of critics and reward models run on every rank, through the worker."""

import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.algos.objectives import SftAlgorithm, ValueLoss
from megarl.data.packing import plan_micro_batches
from megarl.parallel.worker import RankWorker
from megarl.types import AlgoState, Row
from megarl.types.messages import (
    ForwardRequest,
    ForwardResult,
    LoadRequest,
    Role,
    RoleSpec,
    UpdateRequest,
    UpdateResult,
)
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticCase:
    """Steps on the same rows: `micro_batches` by data-parallel rank, and by step the files for the weights."""

    critic: RoleSpec
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    requests: Sequence[UpdateRequest]
    files: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOutcome:
    """What one rank reports: values before the steps, and the steps' results."""

    outputs: ForwardResult | None
    updates: list[UpdateResult | None]


def run_critic(context: RankContext, case: CriticCase) -> CriticOutcome:
    """Run forward passes and updates, and write the weights after each step."""
    worker = join_layout(context, case.critic.layout)
    worker.load(LoadRequest(roles=(case.critic,), seed=0))
    mine = case.micro_batches[worker.layout.dp_group.rank()]
    outputs = worker.forward(case.rows, mine, ForwardRequest(role=case.critic.role, temperature=1.0, step=0))
    updates = []
    for request, files in zip(case.requests, case.files, strict=True):
        updates.append(worker.update(case.rows, mine, request))
        worker.store_weights(files, with_checksums=False, role=case.critic.role)
    return CriticOutcome(outputs=outputs, updates=updates)


def refused_update(context: RankContext, case: CriticCase) -> str:
    """What a frozen critic answers to an update; its weights are written afterwards."""
    worker = join_layout(context, case.critic.layout)
    worker.load(LoadRequest(roles=(case.critic,), seed=0))
    mine = case.micro_batches[worker.layout.dp_group.rank()]
    worker.forward(case.rows, mine, ForwardRequest(role=Role.CRITIC, temperature=1.0, step=0))
    try:
        worker.update(case.rows, mine, case.requests[0])
    except AssertionError as refusal:
        worker.store_weights(case.files[0], with_checksums=False, role=Role.CRITIC)
        return str(refusal)
    raise AssertionError("a frozen critic was updated")


def train_roles(worker: RankWorker, rows: Sequence[Row], steps: range) -> dict[Role, list[float]]:
    """Losses of every trained role that this rank hosts, on ranks that report; a step sees its own four rows."""
    losses: dict[Role, list[float]] = {}
    objectives: dict[Role, Any] = {Role.ACTOR: SftAlgorithm(), Role.CRITIC: ValueLoss()}
    for step, (role, loaded) in itertools.product(steps, worker.roles.items()):
        batch = [rows[(4 * step + i) % len(rows)] for i in range(4)]
        settings, objective = loaded.spec.settings, objectives[role]
        plan = plan_micro_batches([row.num_tokens for row in batch], settings.layout.dp, settings.micro_batch_tokens)
        request = UpdateRequest(
            role=role,
            step=step,
            objective=objective,
            state=AlgoState(),
            denominators=objective.denominators(batch),
            temperature=1.0,
            lr=settings.optimizer.lr,
        )
        result = worker.update(batch, plan[settings.layout.dp_rank_of(worker.rank)], request)
        if result is not None:
            losses.setdefault(role, []).append(result.metrics[f"{role}/loss"])
    return losses


def draw() -> float:
    """A number of this process's generator."""
    import torch

    return torch.rand(()).item()


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """Losses after a checkpoint by role, and the next random number."""

    losses: dict[Role, list[float]]
    drawn: float


def save_roles(
    context: RankContext, roles: Sequence[RoleSpec], rows: Sequence[Row], directory: str, num_drawn: int
) -> Continued:
    """Two steps of every role and some random numbers, a checkpoint, and what the next two steps are.

    The role that is saved first is written last.
    """
    worker = open_roles(context, roles)
    from megarl.parallel.checkpoint import end_writer

    train_roles(worker, rows, range(2))
    for _ in range(num_drawn):
        draw()
    Path(directory).mkdir(exist_ok=True)
    with slow_writer(roles[0].role):
        worker.save_checkpoint(directory, portable=True)
        assert worker.finish_checkpoint(wait=True)
    end_writer()
    return Continued(losses=train_roles(worker, rows, range(2, 4)), drawn=draw())


@contextlib.contextmanager
def slow_writer(role: Role) -> Iterator[None]:
    """Let the process that writes a role's checkpoint wait, so that those of all others are done before."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data

    def write_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.0 if Path(kwargs["write_bucket"][0]).parent.name == role else 0.0)
        return write(*args, **kwargs)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_slowly)
    try:
        yield
    finally:
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write)


def load_roles(
    context: RankContext, roles: Sequence[RoleSpec], rows: Sequence[Row], directory: str, same_layout: Sequence[Role]
) -> Continued:
    """Two steps of every role from the checkpoint."""
    worker = open_roles(context, roles)
    worker.load_checkpoint(directory, same_layout=same_layout)
    return Continued(losses=train_roles(worker, rows, range(2, 4)), drawn=draw())


def open_roles(context: RankContext, roles: Sequence[RoleSpec]) -> RankWorker:
    """A worker that hosts roles of one layout, in a process that may start others: those that write checkpoints."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    worker = join_layout(context, roles[0].layout)
    worker.load(LoadRequest(roles=tuple(roles), seed=0))
    return worker
