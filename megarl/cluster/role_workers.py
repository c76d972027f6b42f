"""The trainer's ranks as the roles that they host: a group of processes per layout."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.cluster.processes import wait_all
from megarl.cluster.roles import by_layout
from megarl.cluster.roster import Process
from megarl.cluster.workers import Calls, WorkerGroup
from megarl.config.schema import LayoutConfig
from megarl.types import FloatArray, Row
from megarl.types.messages import LoadRequest, Part, Role, StoreResult, UpdateRequest, UpdateResult


class RoleWorkers:
    """One group of ranks per layout, the actor's first. A call goes to its role's group, or to all at the same time."""

    def __init__(self, groups: Sequence[WorkerGroup], *, timeout_s: float) -> None:
        self.groups, self._timeout_s = list(groups), timeout_s
        self._group_of: dict[Role, WorkerGroup] = {}

    @property
    def processes(self) -> list[Process]:
        """All ranks; those of the actor's layout first, in their order."""
        return [process for group in self.groups for process in group.processes]

    @property
    def layouts(self) -> list[LayoutConfig]:
        """The layouts that roles can have here."""
        return [group.layout for group in self.groups]

    def load(self, request: LoadRequest) -> None:
        """Start a run on these ranks: models, optimizers, weights. A group without a role forgets its models."""
        hosted = by_layout(request.roles)
        assert hosted.keys() <= set(self.layouts), "Cluster.check_serves was not asked"
        self._group_of = {spec.role: group for group in self.groups for spec in hosted.get(group.layout, ())}
        self._wait(
            (group.begin("load", replace(request, roles=hosted.get(group.layout, ()))) for group in self.groups),
            doing="loading the models",
        )

    def score(
        self,
        role: Role,
        rows: Sequence[Row],
        plan: Sequence[Sequence[Sequence[int]]],
        *,
        temperature: float,
        step: int,
        paired: bool = False,
    ) -> dict[str, list[FloatArray]]:
        """`WorkerGroup.score` of a role."""
        return self._group(role).score(role, rows, plan, temperature=temperature, step=step, paired=paired)

    def update(
        self, rows: Sequence[Row], plan: Sequence[Sequence[Sequence[int]]], request: UpdateRequest
    ) -> UpdateResult:
        """One optimizer step of `request.role` on a mini-batch."""
        return self._group(request.role).update(rows, plan, request)

    def store_weights(
        self, files: Sequence[Path], *, with_checksums: bool = False, role: Role = Role.ACTOR
    ) -> StoreResult:
        """Every rank that hosts a role writes its own slices into preallocated files."""
        return self._group(role).store_weights(role, files, with_checksums=with_checksums)

    def start_checkpoint(self, directory: Path) -> None:
        """Every rank starts to write its part; returns when all have a snapshot, so that training may go on."""
        self._call("save_checkpoint", str(directory), doing="saving a checkpoint")

    def finish_checkpoint(self, *, wait: bool) -> bool:
        """Whether all ranks have written their part; with `wait`, return when they have."""
        return all(self._call("finish_checkpoint", wait=wait, doing="writing a checkpoint"))

    def load_checkpoint(self, directory: Path, *, same_layout: Collection[Role]) -> None:
        """Continue from a complete checkpoint, whatever layouts wrote it; `same_layout`: roles laid out as there."""
        self._call("load_checkpoint", str(directory), same_layout=same_layout, doing="loading a checkpoint")

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        """Move parts of a role to the hosts; returns the bytes released on all devices together."""
        return self._group(role).offload(role, parts)

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        """Bring parts of a role back to the devices."""
        self._group(role).onload(role, parts)

    def start_profile(self) -> None:
        """Start torch's profiler in every rank."""
        self._call("start_profile", doing="starting the profiler")

    def stop_profile(self, directory: Path) -> None:
        """Every rank writes what happened since, as rank_N.json.gz (Chrome's trace format).

        Those of further layouts write into directories named after their roles.
        """
        first, *others = self.groups
        named = [(first, directory), *((group, directory / self._roles_of(group)) for group in others)]
        calls = (group.begin("stop_profile", str(path)) for group, path in named)
        self._wait(calls, doing="writing profiler traces")

    def _group(self, role: Role) -> WorkerGroup:
        assert role in self._group_of, f"these ranks host {', '.join(self._group_of)}, not the {role}; load it first"
        return self._group_of[role]

    def _roles_of(self, group: WorkerGroup) -> str:
        return "+".join(role for role, its_group in self._group_of.items() if its_group is group)

    def _call(self, method: str, *args: Any, doing: str, **kwargs: Any) -> list[Any]:
        return self._wait((group.begin(method, *args, **kwargs) for group in self.groups), doing=doing)

    def _wait(self, calls: Iterable[Calls], *, doing: str) -> list[Any]:
        together = [call for of_group in calls for call in of_group]
        return wait_all(together, timeout_s=self._timeout_s, doing=doing)
