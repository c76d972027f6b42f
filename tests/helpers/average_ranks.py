"""What the tests of a teacher that follows the actor run on every rank: updates, and the weights after each."""

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.parallel.worker import RankWorker
from megarl.types import Row
from megarl.types.messages import LoadRequest, Part, Role, RoleSpec, UpdateRequest
from tests.helpers.critic_ranks import slow_writer
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout

Slices = list[tuple[str, Any, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageCase:
    """Roles of one layout, the actor first; rows by data-parallel rank and micro-batch; updates one after the other.

    save_after: the update after which a checkpoint is written to `directory`; it is loaded before the first one if
    `loads`.
    """

    roles: tuple[RoleSpec, ...]
    rows: Sequence[Row]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    requests: Sequence[UpdateRequest]
    directory: str = ""
    save_after: int | None = None
    loads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """This rank's slices of both models before the first and after each update, metrics, and bytes of the teacher.

    freed: when it leaves the device; own: of its weights alone.
    """

    actor: list[Slices]
    teacher: list[Slices]
    metrics: list[Mapping[str, float]]
    freed: int = 0
    own: int = 0


def follow(context: RankContext, case: AverageCase) -> Followed:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    worker = join_layout(context, case.roles[0].layout)
    worker.load(LoadRequest(roles=case.roles, seed=0))
    from megarl.parallel.checkpoint import end_writer

    if case.loads:
        worker.load_checkpoint(case.directory, same_layout=())
    mine, has_teacher = case.micro_batches[worker.layout.dp_group.rank()], Role.TEACHER in worker.roles
    found = Followed(actor=[weights(worker, Role.ACTOR)], teacher=[], metrics=[])
    found.teacher.extend([weights(worker, Role.TEACHER)] if has_teacher else [])
    for number, request in enumerate(case.requests):
        result = worker.update(case.rows, mine, request)
        found.metrics.extend([] if result is None else [result.metrics])
        found.actor.append(weights(worker, Role.ACTOR))
        found.teacher.extend([weights(worker, Role.TEACHER)] if has_teacher else [])
        if number == case.save_after:
            Path(case.directory).mkdir(exist_ok=True)
            try:
                with slow_writer(Role.ACTOR):
                    worker.save_checkpoint(case.directory, portable=True)
                    assert worker.finish_checkpoint(wait=True)
            finally:
                end_writer()
    if not has_teacher:
        return found
    freed = worker.offload(Role.TEACHER, [Part.PARAMS])
    worker.onload(Role.TEACHER, [Part.PARAMS])
    found.teacher.append(weights(worker, Role.TEACHER))
    own = sum(p.nbytes for chunk in worker.roles[Role.TEACHER].chunks for p in chunk.parameters())
    return Followed(actor=found.actor, teacher=found.teacher, metrics=found.metrics, freed=freed, own=own)


def weights(worker: RankWorker, role: Role) -> Slices:
    """A role's trained weights, or the average that the teacher's are made of."""
    from megarl.parallel.building import named_shards, rank_slices

    loaded, average = worker.roles[role], worker.roles[role].average
    spec, of_adapters = loaded.adapters or loaded.model_spec, loaded.adapters is not None
    shards = []
    for i, chunk in enumerate(loaded.chunks):
        for name, local_name, shard in named_shards(chunk, of_adapters=of_adapters):
            shards.append((name, shard.data if average is None else average.values[i][local_name]))
            if average is not None:
                assert torch.equal(shard.data, average.values[i][local_name].to(shard.dtype))
    return [(part.tensor, part.index, part.view.float().clone()) for part in rank_slices(shards, spec, worker.layout)]
