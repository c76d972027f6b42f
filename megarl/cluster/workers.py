"""Call the trainer's ranks from the driver, by the role of the model; every Megatron layout has ranks of its own."""

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.processes import wait_all
from megarl.cluster.roles import by_layout
from megarl.cluster.roster import Process
from megarl.config.schema import LayoutConfig
from megarl.types import FloatArray, Row
from megarl.types.messages import (
    LoadRequest,
    MicroBatchPlan,
    Part,
    Role,
    RowScores,
    ScoreRequest,
    StoreResult,
    UpdateRequest,
    UpdateResult,
)

ROWS_PER_SHARD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShards:
    """A batch's rows (one sample each) in Ray's object store, in shards; a rank fetches only the shards it needs."""

    refs: tuple[Any, ...]
    rows_per_shard: int

    def fetch(self, micro_batches: Iterable[Iterable[int]]) -> dict[int, Row]:
        """Fetch the rows of the given micro-batches, and return them by their index in the batch."""
        wanted = sorted({i for batch in micro_batches for i in batch})
        shards = sorted({i // self.rows_per_shard for i in wanted})
        loaded = dict(zip(shards, ray.get([self.refs[s] for s in shards]), strict=True))
        return {i: loaded[i // self.rows_per_shard][i % self.rows_per_shard] for i in wanted}


def put_rows(rows: Sequence[Row]) -> RowShards:
    """Put the rows of a batch into Ray's object store, in shards of `ROWS_PER_SHARD` rows."""
    starts = range(0, len(rows), ROWS_PER_SHARD)
    refs = tuple(ray.put(list(rows[start : start + ROWS_PER_SHARD])) for start in starts)
    return RowShards(refs=refs, rows_per_shard=ROWS_PER_SHARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The ranks of one layout in Megatron's order. Each hosts its shard of every role (model) that has this layout."""

    layout: LayoutConfig
    processes: list[Process]


class RoleWorkers:
    """The trainer's ranks as the driver calls them: either the ranks that host one role's model, or all ranks.

    groups: one per layout, the actor's layout first.
    """

    def __init__(self, groups: Sequence[RankGroup], *, timeout_s: float) -> None:
        self.groups, self._timeout_s = list(groups), timeout_s
        self._group_of: dict[Role, RankGroup] = {}

    @property
    def processes(self) -> list[Process]:
        """Return all ranks, those of the actor's layout first."""
        return [process for group in self.groups for process in group.processes]

    def load(self, request: LoadRequest) -> None:
        """Start a run on these ranks: build models and optimizers, read weights. Models of an earlier run are freed."""
        hosted = by_layout(request.roles)
        assert hosted.keys() <= {group.layout for group in self.groups}, "Cluster.check_serves was not asked"
        self._group_of = {spec.role: group for group in self.groups for spec in hosted.get(group.layout, ())}
        calls = [
            (p, p.actor.call.remote("load", replace(request, roles=hosted.get(group.layout, ()))))
            for group in self.groups
            for p in group.processes
        ]
        self._wait(calls, doing="loading the models")

    def score(self, rows: Sequence[Row], plan: MicroBatchPlan, request: ScoreRequest) -> dict[str, list[FloatArray]]:
        """Run a role's model on all rows, and return its scores: by name, an array per row in the rows' order.

        A language model returns `logprobs` and `entropy`, a critic or reward model `values`. With `request.paired`
        there is also `kl`; see `HeadRequest`.
        """
        results: list[RowScores] = self._call_with_rows(
            "score", rows, plan, request, doing=f"scoring with the {request.role}"
        )
        merged: dict[str, dict[int, FloatArray]] = {}
        for result in results:
            for name, arrays in result.scores.items():
                merged.setdefault(name, {}).update(arrays)
        return {name: [arrays[i] for i in range(len(rows))] for name, arrays in merged.items()}

    def update(self, rows: Sequence[Row], plan: MicroBatchPlan, request: UpdateRequest) -> UpdateResult:
        """Take one optimizer step of `request.role` on a mini-batch."""
        results: list[UpdateResult] = self._call_with_rows(
            "update", rows, plan, request, doing=f"updating the {request.role}"
        )
        before = {i: a for r in results for i, a in r.before.items()}
        return UpdateResult(metrics=results[0].metrics, before=before)

    def _call_with_rows(
        self,
        method: str,
        rows: Sequence[Row],
        plan: MicroBatchPlan,
        request: ScoreRequest | UpdateRequest,
        *,
        doing: str,
    ) -> list[Any]:
        """Call a method of a role's ranks with rows, and return one answer per data-parallel replica."""
        group, shards = self._group(request.role), put_rows(rows)
        calls = [
            (p, p.actor.call_with_rows.remote(method, shards, plan.ranks[group.layout.dp_rank_of(rank)], request))
            for rank, p in enumerate(group.processes)
        ]
        return [result for result in self._wait(calls, doing=doing) if result is not None]

    def store_weights(
        self, files: Sequence[Path], *, with_checksums: bool = False, role: Role = Role.ACTOR
    ) -> StoreResult:
        """Make every rank that hosts a role write its own slices of the model into preallocated files."""
        options = {"with_checksums": with_checksums, "role": role}
        parts = self._call("store_weights", [str(f) for f in files], role_only=role, doing="writing weights", **options)
        return functools.reduce(StoreResult.merged, parts)

    def start_checkpoint(self, directory: Path, *, portable: bool) -> None:
        """Make every rank start writing a checkpoint; return once all have a snapshot, so that training can go on.

        portable: make it readable under any layout, which takes time and memory; see `parallel.checkpoint`.
        """
        self._call("save_checkpoint", str(directory), portable=portable, doing="saving a checkpoint")

    def finish_checkpoint(self, *, wait: bool) -> bool:
        """Return whether all ranks have written their part of the checkpoint; with `wait`, wait until they have."""
        return all(self._call("finish_checkpoint", wait=wait, doing="writing a checkpoint"))

    def load_checkpoint(
        self, directory: Path, *, same_layout: Collection[Role] = (), weights_only: bool = False
    ) -> None:
        """Load a complete checkpoint, which may have been saved with other layouts if it is portable.

        same_layout: the roles whose layout is the same as when they were saved. weights_only: load no optimizer states;
        then any checkpoint will do.
        """
        options: dict[str, Any] = {"same_layout": same_layout, "weights_only": weights_only}
        self._call("load_checkpoint", str(directory), doing="loading a checkpoint", **options)

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        """Move parts of a role's state, such as parameters, to host memory; return the bytes freed on all devices."""
        return sum(self._call("offload", role, list(parts), role_only=role, doing=f"offloading the {role}"))

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        """Move parts of a role's state, such as parameters, from host memory back to the devices."""
        self._call("onload", role, list(parts), role_only=role, doing=f"onloading the {role}")

    def start_profile(self) -> None:
        """Start torch's profiler in every rank."""
        self._call("start_profile", doing="starting the profiler")

    def stop_profile(self, directory: Path) -> None:
        """Make every rank write its trace since `start_profile` as rank_N.json.gz (Chrome's trace format).

        The traces of layouts other than the actor's go to subdirectories named after their roles.
        """
        calls = []
        for i, group in enumerate(self.groups):
            roles = "+".join(role for role, its_group in self._group_of.items() if its_group is group)
            path = str(directory / roles if i else directory)
            calls += [(p, p.actor.call.remote("stop_profile", path)) for p in group.processes]
        self._wait(calls, doing="writing profiler traces")

    def _group(self, role: Role) -> RankGroup:
        assert role in self._group_of, f"these ranks host {', '.join(self._group_of)}, not the {role}; load it first"
        return self._group_of[role]

    def _call(self, method: str, *args: Any, doing: str, role_only: Role | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of the ranks that host a role, or of all ranks, and wait for their answers."""
        processes = self.processes if role_only is None else self._group(role_only).processes
        return self._wait([(p, p.actor.call.remote(method, *args, **kwargs)) for p in processes], doing=doing)

    def _wait(self, calls: Sequence[tuple[Process, Any]], *, doing: str) -> list[Any]:
        return wait_all(calls, timeout_s=self._timeout_s, doing=doing)
