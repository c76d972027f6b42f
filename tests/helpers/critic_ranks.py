"""What the tests of critics and reward models run on every rank, through the worker."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.types import Row
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


def draw() -> float:
    """A number of this process's generator."""
    import torch

    return torch.rand(()).item()


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """Losses after a checkpoint by role, and the next random number."""

    losses: dict[Role, list[float]]
    drawn: float


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
