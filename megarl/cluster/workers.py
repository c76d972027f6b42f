"""The trainer's ranks, called together."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.processes import Process, wait_all
from megarl.cluster.rows import RowShards, put_rows
from megarl.config.schema import LayoutConfig
from megarl.parallel.messages import LoadRequest, Part, Role, StoreResult, UpdateRequest, UpdateResult
from megarl.types import FloatArray, Row


class WorkerGroup:
    """The trainer's ranks under one layout, called together."""

    def __init__(self, processes: Sequence[Process], *, layout: LayoutConfig, timeout_s: float) -> None:
        self.processes, self._layout, self._timeout_s = list(processes), layout, timeout_s

    def load(self, request: LoadRequest) -> None:
        """Start a run on these ranks: models, optimizer, weights."""
        self._call("load", request, doing="loading the model")

    def score(
        self,
        role: Role,
        rows: Sequence[Row],
        plan: Sequence[Sequence[Sequence[int]]],
        *,
        temperature: float,
        step: int,
        name: str = "logprobs",
    ) -> list[FloatArray]:
        """One score (`logprobs`, `entropy` or `values`) of all rows in order; `plan[dp][micro_batch]` lists rows."""
        shards = put_rows(rows)
        results = self._call_with_rows(
            "score", shards, plan, doing=f"scoring with the {role}", role=role, temperature=temperature, step=step
        )
        merged = {i: a for r in results if r is not None for i, a in r.scores[name].items()}
        return [merged[i] for i in range(len(rows))]

    def update(
        self, rows: Sequence[Row], plan: Sequence[Sequence[Sequence[int]]], request: UpdateRequest
    ) -> UpdateResult:
        """One optimizer step on a mini-batch."""
        shards = put_rows(rows)
        results = self._call_with_rows("update", shards, plan, doing=f"updating the {request.role}", request=request)
        reported: list[UpdateResult] = [r for r in results if r is not None]
        before = {i: a for r in reported for i, a in r.before.items()}
        return UpdateResult(metrics=reported[0].metrics, before=before)

    def store_weights(self, files: Sequence[Path], *, with_checksums: bool = False) -> StoreResult:
        """Every rank writes its own slices into preallocated files."""
        paths = [str(f) for f in files]
        parts = self._call("store_weights", paths, with_checksums=with_checksums, doing="writing weights")
        return functools.reduce(StoreResult.merged, parts)

    def start_checkpoint(self, directory: Path) -> None:
        """Every rank starts to write its part; returns when it has a snapshot, so that training may go on."""
        self._call("save_checkpoint", str(directory), doing="saving a checkpoint")

    def finish_checkpoint(self, *, wait: bool) -> bool:
        """Whether all ranks have written their part; with `wait`, return when they have."""
        return all(self._call("finish_checkpoint", wait=wait, doing="writing a checkpoint"))

    def load_checkpoint(self, directory: Path, *, same_layout: bool) -> None:
        """Continue from a complete checkpoint, whatever layout wrote it."""
        self._call("load_checkpoint", str(directory), same_layout=same_layout, doing="loading a checkpoint")

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        """Move parts of a role to the hosts; returns the bytes released on all devices together."""
        return sum(self._call("offload", role, list(parts), doing=f"offloading the {role}"))

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        """Bring parts of a role back to the devices."""
        self._call("onload", role, list(parts), doing=f"onloading the {role}")

    def start_profile(self) -> None:
        """Start torch's profiler in every rank."""
        self._call("start_profile", doing="starting the profiler")

    def stop_profile(self, directory: Path) -> None:
        """Every rank writes what happened since, as rank_N.json.gz (Chrome's trace format)."""
        self._call("stop_profile", str(directory), doing="writing profiler traces")

    def _call(self, method: str, *args: Any, doing: str, **kwargs: Any) -> list[Any]:
        calls = [(p, p.actor.call.remote(method, *args, **kwargs)) for p in self.processes]
        return wait_all(calls, timeout_s=self._timeout_s, doing=doing)

    def _call_with_rows(
        self,
        method: str,
        shards: RowShards,
        plan: Sequence[Sequence[Sequence[int]]],
        *,
        doing: str,
        **kwargs: Any,
    ) -> list[Any]:
        calls = [
            (p, p.actor.call_with_rows.remote(method, shards, plan[self._layout.dp_rank_of(rank)], **kwargs))
            for rank, p in enumerate(self.processes)
        ]
        return wait_all(calls, timeout_s=self._timeout_s, doing=doing)
