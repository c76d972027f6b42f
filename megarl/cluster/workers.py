"""The trainer's ranks under one layout, called together."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from megarl.cluster.processes import wait_all
from megarl.cluster.roster import Process
from megarl.cluster.rows import RowShards, put_rows
from megarl.config.schema import LayoutConfig
from megarl.types import FloatArray, Row
from megarl.types.messages import Part, Role, StoreResult, UpdateRequest, UpdateResult

# Remote calls under way.
Calls: TypeAlias = list[tuple[Process, Any]]


class WorkerGroup:
    """Ranks under one layout. Each hosts its shard of every role of this layout."""

    def __init__(self, processes: Sequence[Process], *, layout: LayoutConfig, timeout_s: float) -> None:
        self.processes, self.layout, self._timeout_s = list(processes), layout, timeout_s

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Calls:
        """Call a method of every rank's worker without waiting."""
        return [(p, p.actor.call.remote(method, *args, **kwargs)) for p in self.processes]

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
        """What a role says of all rows, in order, from one pass; `plan[dp][micro_batch]` lists rows.

        Log-probs and entropies (`logprobs`, `entropy`) of a language model, `values` of a critic or reward model.
        With `paired` the second half of each micro-batch is the first with other prompts, and the answer is `kl`; see
        `HeadRequest`.
        """
        shards = put_rows(rows)
        results = self._call_with_rows(
            "score",
            shards,
            plan,
            doing=f"scoring with the {role}",
            role=role,
            temperature=temperature,
            step=step,
            paired=paired,
        )
        merged: dict[str, dict[int, FloatArray]] = {}
        for scores in (result.scores for result in results if result is not None):
            for name, arrays in scores.items():
                merged.setdefault(name, {}).update(arrays)
        return {name: [arrays[i] for i in range(len(rows))] for name, arrays in merged.items()}

    def update(
        self, rows: Sequence[Row], plan: Sequence[Sequence[Sequence[int]]], request: UpdateRequest
    ) -> UpdateResult:
        """One optimizer step on a mini-batch."""
        shards = put_rows(rows)
        results = self._call_with_rows("update", shards, plan, doing=f"updating the {request.role}", request=request)
        reported: list[UpdateResult] = [r for r in results if r is not None]
        before = {i: a for r in reported for i, a in r.before.items()}
        return UpdateResult(metrics=reported[0].metrics, before=before)

    def store_weights(self, role: Role, files: Sequence[Path], *, with_checksums: bool) -> StoreResult:
        """Every rank writes its own slices of a role's model into preallocated files."""
        paths = [str(f) for f in files]
        parts = self._call("store_weights", paths, with_checksums=with_checksums, role=role, doing="writing weights")
        return functools.reduce(StoreResult.merged, parts)

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        """Move parts of a role to the hosts; returns the bytes released on all devices together."""
        return sum(self._call("offload", role, list(parts), doing=f"offloading the {role}"))

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        """Bring parts of a role back to the devices."""
        self._call("onload", role, list(parts), doing=f"onloading the {role}")

    def _call(self, method: str, *args: Any, doing: str, **kwargs: Any) -> list[Any]:
        return wait_all(self.begin(method, *args, **kwargs), timeout_s=self._timeout_s, doing=doing)

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
            (p, p.actor.call_with_rows.remote(method, shards, plan[self.layout.dp_rank_of(rank)], **kwargs))
            for rank, p in enumerate(self.processes)
        ]
        return wait_all(calls, timeout_s=self._timeout_s, doing=doing)
