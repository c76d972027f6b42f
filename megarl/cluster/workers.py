"""Call the trainer's ranks from the driver, by the role of the model; every Megatron layout has ranks of its own."""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster.actors import RankActor
from megarl.cluster.processes import wait_all
from megarl.cluster.remotes import PendingCall, Process, R
from megarl.cluster.roles import by_layout
from megarl.cluster.row_shards import RowShard, put_rows
from megarl.config.schema import LayoutConfig
from megarl.errors import StorageError
from megarl.host.writing import dispensable
from megarl.parallel.worker import RankWorker
from megarl.types import FloatArray, Row
from megarl.types.messages import (
    AccumulateRequest,
    ForwardRequest,
    LoadRequest,
    MicroBatchPlan,
    Part,
    Role,
    StepRequest,
    StoreResult,
    UpdateRequest,
    UpdateResult,
)

if TYPE_CHECKING:
    import torch

    from megarl.types.passes import PassPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of one layout in Megatron's order. Each hosts its shard of every role (model) that has this layout."""

    layout: LayoutConfig
    processes: list[Process[RankActor]]

    def shares(
        self, rows: Sequence[Row], plan: MicroBatchPlan
    ) -> list[tuple[Process[RankActor], RowShard, Sequence[Sequence[int]]]]:
        """Put rows into Ray's object store; return each rank with the rows and micro-batches of its replica."""
        shards, replicas = put_rows(rows, plan), [self.layout.dp_rank_of(rank) for rank in range(len(self.processes))]
        return [(p, shards[dp], plan.ranks[dp]) for p, dp in zip(self.processes, replicas, strict=True)]


class RoleWorkers:
    """The trainer's ranks as the driver calls them: either the ranks that host one role's model, or all ranks.

    groups: one per layout, the actor's layout first.
    """

    def __init__(self, groups: Sequence[RankGroup], *, timeout_s: float) -> None:
        self.groups, self._timeout_s = list(groups), timeout_s
        self._group_of: dict[Role, RankGroup] = {}

    @property
    def processes(self) -> list[Process[RankActor]]:
        """Return all ranks, those of the actor's layout first."""
        return [process for group in self.groups for process in group.processes]

    def load(self, request: LoadRequest) -> None:
        """Start a run on these ranks: build models and optimizers, read weights. Models of an earlier run are freed."""
        hosted = by_layout(request.roles)
        assert hosted.keys() <= {group.layout for group in self.groups}, "Cluster.check_serves was not asked"
        self._group_of = {spec.role: group for group in self.groups for spec in hosted.get(group.layout, ())}
        calls = [
            p.call(RankWorker.load, replace(request, roles=hosted.get(group.layout, ())))
            for group in self.groups
            for p in group.processes
        ]
        self._wait(calls, doing="loading the models")

    def forward(
        self, rows: Sequence[Row], plan: MicroBatchPlan, request: ForwardRequest
    ) -> dict[str, list[FloatArray]]:
        """Run a role's model on all rows, and return its outputs: by name, an array per row in the rows' order.

        A language model returns `logprobs` and `entropy`, a critic or reward model `values`. With `request.paired`
        there is also `kl`; see `HeadRequest`.
        """
        shares = self._group(request.role).shares(rows, plan)
        calls = [p.ask(RankActor.forward, shard, mine, request) for p, shard, mine in shares]
        merged: dict[str, dict[int, FloatArray]] = {}
        for result in self._wait(calls, doing=f"running a forward pass of the {request.role}"):
            for name, arrays in result.quantities.items() if result is not None else ():
                merged.setdefault(name, {}).update(arrays)
        return {name: [arrays[i] for i in range(len(rows))] for name, arrays in merged.items()}

    def record_pass(self, row: Row, temperature: float) -> "dict[PassPlace, torch.Tensor]":
        """Return the tensors of the actor's pass over a row; the layout has one replica. See `megarl bisect`."""
        calls = [p.call(RankWorker.record_pass, row, temperature) for p in self._group(Role.ACTOR).processes]
        recorded: dict[PassPlace, torch.Tensor] = {}
        for part in self._wait(calls, doing="recording a pass"):
            recorded |= part
        return recorded

    def update(self, rows: Sequence[Row], plan: MicroBatchPlan, request: UpdateRequest) -> UpdateResult:
        """Take one optimizer step of `request.role` on a mini-batch."""
        shares = self._group(request.role).shares(rows, plan)
        calls = [p.ask(RankActor.update, shard, mine, request) for p, shard, mine in shares]
        return UpdateResult.merged(self._wait(calls, doing=f"updating the {request.role}"))

    def accumulate(self, rows: Sequence[Row], plan: MicroBatchPlan, request: AccumulateRequest) -> UpdateResult:
        """Add the gradient on rows to those that the next `apply` takes.

        If it fails, `discard` the gradients of `request.role`: ranks need not have the same ones.
        """
        shares = self._group(request.role).shares(rows, plan)
        calls = [p.ask(RankActor.accumulate, shard, mine, request) for p, shard, mine in shares]
        return UpdateResult.merged(self._wait(calls, doing=f"accumulating gradients of the {request.role}"))

    def apply(self, request: StepRequest) -> dict[str, float]:
        """Take one optimizer step of `request.role` with the accumulated gradients; return its metrics."""
        calls = [p.call(RankWorker.apply, request) for p in self._group(request.role).processes]
        return self._wait(calls, doing=f"updating the {request.role}")[0]

    def discard(self, role: Role, *, timeout_s: float) -> None:
        """Forget the accumulated gradients of a role. Raises WorkerError if not all ranks answer in time."""
        calls = [p.call(RankWorker.discard, role) for p in self._group(role).processes]
        wait_all(calls, timeout_s=timeout_s, doing=f"discarding gradients of the {role}")

    def store_weights(
        self,
        files: Sequence[Path],
        *,
        with_checksums: bool = False,
        role: Role = Role.ACTOR,
        gradients: bool = False,
    ) -> StoreResult:
        """Make every rank that hosts a role write its own slices of the model into preallocated files.

        gradients: write what was accumulated instead of weights.
        """
        paths = [str(file) for file in files]
        calls = [
            p.call(RankWorker.store_weights, paths, with_checksums=with_checksums, role=role, gradients=gradients)
            for p in self._group(role).processes
        ]
        return functools.reduce(StoreResult.merged, self._wait(calls, doing="writing weights"))

    def store_adapters(self, file: Path, *, role: Role = Role.ACTOR) -> StoreResult:
        """Make every rank that hosts a role write its own slices of the role's adapters into a preallocated file."""
        calls = [p.call(RankWorker.store_adapters, str(file), role=role) for p in self._group(role).processes]
        return functools.reduce(StoreResult.merged, self._wait(calls, doing="writing adapters"))

    def start_checkpoint(self, directory: Path, *, portable: bool) -> None:
        """Make every rank start writing a checkpoint; return once all have a snapshot, so that training can go on.

        portable: make it readable under any layout, which takes time and memory; see `parallel.checkpoint`.
        """
        calls = [p.call(RankWorker.save_checkpoint, str(directory), portable=portable) for p in self.processes]
        self._wait(calls, doing="saving a checkpoint")

    def finish_checkpoint(self, *, wait: bool) -> bool:
        """Return whether all ranks have written their part of the checkpoint; with `wait`, wait until they have."""
        calls = [p.call(RankWorker.finish_checkpoint, wait=wait) for p in self.processes]
        return all(self._wait(calls, doing="writing a checkpoint"))

    def load_checkpoint(
        self, directory: Path, *, same_layout: Collection[Role] = (), weights_only: bool = False
    ) -> None:
        """Load a complete checkpoint, which may have been saved with other layouts if it is portable.

        same_layout: the roles whose layout is the same as when they were saved. weights_only: load no optimizer states;
        then any checkpoint will do.
        """
        load, path = RankWorker.load_checkpoint, str(directory)
        calls = [p.call(load, path, same_layout=same_layout, weights_only=weights_only) for p in self.processes]
        self._wait(calls, doing="loading a checkpoint")

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        """Move parts of a role's state, such as parameters, to host memory; return the bytes freed on all devices."""
        calls = [p.call(RankWorker.offload, role, list(parts)) for p in self._group(role).processes]
        return sum(self._wait(calls, doing=f"offloading the {role}"))

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        """Move parts of a role's state, such as parameters, from host memory back to the devices."""
        calls = [p.call(RankWorker.onload, role, list(parts)) for p in self._group(role).processes]
        self._wait(calls, doing=f"onloading the {role}")

    def start_profile(self) -> None:
        """Start torch's profiler in every rank."""
        self._wait([p.call(RankWorker.start_profile) for p in self.processes], doing="starting the profiler")

    def stop_profile(self, directory: Path) -> None:
        """Make every rank write its trace since `start_profile` as rank_N.json.gz (Chrome's trace format).

        The traces of layouts other than the actor's go to subdirectories named after their roles.
        """
        calls = []
        for i, group in enumerate(self.groups):
            roles = "+".join(role for role, its_group in self._group_of.items() if its_group is group)
            path = str(directory / roles if i else directory)
            calls += [p.call(RankWorker.stop_profile, path) for p in group.processes]
        for reason in filter(None, self._wait(calls, doing="writing profiler traces")):
            with dispensable("profiler traces"):
                raise StorageError(reason)

    def _group(self, role: Role) -> RankGroup:
        assert role in self._group_of, f"these ranks host {', '.join(self._group_of)}, not the {role}; load it first"
        return self._group_of[role]

    def _wait(self, calls: Sequence[PendingCall[R]], *, doing: str) -> list[R]:
        return wait_all(calls, timeout_s=self._timeout_s, doing=doing)
