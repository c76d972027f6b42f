"""What tests of earlier versions run on every rank: steps whose loss compares the policy with what sampled."""

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.types import PolicyOutputs, Row, RowBatch
from megarl.types.messages import ForwardRequest, LoadRequest, Role, RoleSpec, UpdateRequest
from megarl.types.rows import lags_of
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionStep:
    """One step: its rows, whose tokens have lags, and its request; None: it updates nothing. files: for the weights."""

    rows: Sequence[Row]
    request: UpdateRequest | None
    files: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCase:
    """An actor and its steps; a checkpoint is read from `loads` before them, and written to `saves` after `save_at`."""

    role: RoleSpec
    micro_batches: Sequence[Sequence[Sequence[int]]]
    steps: Sequence[VersionStep]
    loads: str = ""
    saves: str = ""
    save_at: int = 0


# By row: log-probs by the weights that sampled, and the divergence of the policy from these.
Seen = Mapping[str, tuple[np.ndarray, np.ndarray]]


class _Spy:
    """An objective that keeps what the head said beside the policy."""

    def __init__(self, objective: Any) -> None:
        self.objective, self.seen = objective, dict[str, tuple[np.ndarray, np.ndarray]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: Any) -> Any:
        assert out.divergence is not None
        pairs = zip(out.comparison["teacher_logprobs"], out.divergence.detach(), strict=True)
        self.seen |= {label: (a.numpy(), b.numpy()) for label, (a, b) in zip(rows.labels, pairs, strict=True)}
        return self.objective.loss(rows, out, state)


def compare_versions(context: RankContext, case: VersionCase) -> list[Seen]:
    """What this rank saw in each step that updates; the weights are written after each step."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    worker = join_layout(context, case.role.layout)
    worker.load(LoadRequest(roles=(case.role,), seed=0))
    from megarl.parallel.checkpoint import end_writer

    if case.loads:
        worker.load_checkpoint(case.loads, same_layout=())
    mine, found = case.micro_batches[worker.layout.dp_group.rank()], []
    parameters = [p for chunk in worker.roles[Role.ACTOR].chunks for p in chunk.parameters()]
    for number, step in enumerate(case.steps):
        if step.request is not None:
            before = [p.detach().clone() for p in parameters]
            worker.forward(
                step.rows,
                mine,
                ForwardRequest(
                    role=Role.ACTOR,
                    temperature=step.request.temperature,
                    step=step.request.step,
                    keeps=0,
                    lags=lags_of(step.rows),
                ),
            )
            assert all(map(torch.equal, before, parameters))
            spy = _Spy(step.request.objective)
            worker.update(step.rows, mine, replace(step.request, objective=spy))  # type: ignore[arg-type]
            found.append(spy.seen)
        if step.files:
            worker.store_weights(step.files, with_checksums=False)
        if case.saves and number == case.save_at:
            Path(case.saves).mkdir(exist_ok=True)
            try:
                worker.save_checkpoint(case.saves, portable=True)
                assert worker.finish_checkpoint(wait=True)
            finally:
                end_writer()
    return found
