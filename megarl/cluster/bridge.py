"""Weight sync by the bridge: each worker of each engine gets the slices that it lacks from ranks that have them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.processes import Process, wait_all
from megarl.parallel.weights.bridge.boxes import num_elements
from megarl.parallel.weights.bridge.plan import BUCKET_BYTES, Holding, Message, Plan, build_plan
from megarl.parallel.weights.bridge.wires import Share
from megarl.parallel.weights.collective import Meeting
from megarl.rollout.engine import Received
from megarl.rollout.weight_sync import WIRE_BYTES, compare_checksums
from megarl.safetensors_map import TensorSpec

_DOING = "syncing weights"


class BridgeSync:
    """As `WeightSync`, by a plan made once: sources are the actor's ranks, sinks the workers of all engines in turn.

    needs: what each worker of an engine needs; shares: of each engine the ranks whose devices its workers use.
    """

    def __init__(
        self,
        ranks: Sequence[Process],
        engines: Sequence[Process],
        specs: Mapping[str, TensorSpec],
        needs: Sequence[Holding],
        *,
        shares: Sequence[Sequence[int]],
        segments: Path,
        over_devices: bool,
        timeout_s: float,
    ) -> None:
        self._ranks, self._engines, self._timeout_s = list(ranks), list(engines), timeout_s
        self._tp, self._transfer = len(needs), 0
        held = self._call(self._ranks, [("held_weights", ())] * len(ranks))
        sinks = range(len(ranks), len(ranks) + len(engines) * self._tp)
        neighbours = {
            self._sink(engine, worker): [rank]
            for engine, its_ranks in enumerate(shares)
            for worker, rank in enumerate(its_ranks)
        }
        self.plan = build_plan(
            specs,
            dict(enumerate(held)),
            {sink: needs[i % self._tp] for i, sink in enumerate(sinks)},
            neighbours=neighbours,
            bucket_bytes=BUCKET_BYTES,
        )
        self._open(self.plan, segments, over_devices=over_devices)

    def push(self, version: int, *, verify: bool) -> dict[str, float]:
        """See `PolicySync`. A worker receives only what it needs and shares no memory with."""
        self._transfer += 1
        sends = [
            (p, p.actor.call.remote("send_over_bridge", self._transfer, with_checksums=verify)) for p in self._ranks
        ]
        arguments = {"version": version, "with_checksums": verify}
        receives = [(p, p.actor.call.remote("receive_over_bridge", self._transfer, **arguments)) for p in self._engines]
        answers = wait_all([*sends, *receives], timeout_s=self._timeout_s, doing=_DOING)
        sent, received = answers[: len(sends)], [worker for engine in answers[len(sends) :] for worker in engine]
        if verify:
            self._compare(sent, received)
        return {WIRE_BYTES: float(sum(worker.wire_bytes for worker in received))}

    def close(self) -> None:
        """Remove what the ranks keep in shared memory."""
        calls = [(p, p.actor.call.remote("close_bridge")) for p in self._ranks]
        wait_all(calls, timeout_s=self._timeout_s, doing="closing the bridge for weights")

    def _compare(self, sent: Sequence[Mapping[int, Mapping[str, int]]], received: Sequence[Received]) -> None:
        """What every worker has with what the ranks together sent it."""
        for sink, worker in zip(self.plan.needs, received, strict=True):
            names = [name for name, box in self.plan.needs[sink].items() if num_elements(box)]
            parts = [sums.get(sink, {}) for sums in sent]
            sums = {name: sum(part.get(name, 0) for part in parts) % (1 << 64) for name in names}
            compare_checksums(names, sums, worker.checksums)

    def _sink(self, engine: int, worker: int) -> int:
        """A worker's number in the plan."""
        return len(self._ranks) + engine * self._tp + worker

    def _open(self, plan: Plan, segments: Path, *, over_devices: bool) -> None:
        first = self._ranks[0]
        (port,) = self._call([first], [("offer_channel", (first.location.address,))])
        size = len(self._ranks) + len(plan.needs)
        hosts = [rank.location.host for rank in self._ranks]
        hosts += [engine.location.host for engine in self._engines for _ in range(self._tp)]

        def share(process: int, messages: list[Message]) -> Share:
            return Share(
                messages=tuple(messages),
                specs=plan.specs,
                needs=plan.needs.get(process, {}),
                segments=str(segments),
                meeting=Meeting(
                    address=first.location.address, port=port, rank=process, size=size, timeout_s=self._timeout_s
                ),
                hosts=tuple(hosts),
                over_devices=over_devices,
            )

        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("open_bridge", (share(rank, plan.of_source(rank)),)) for rank in range(len(self._ranks))
        ]
        for engine in range(len(self._engines)):
            its_sinks = [self._sink(engine, worker) for worker in range(self._tp)]
            calls.append(("open_bridge", ([share(sink, plan.of_sink(sink)) for sink in its_sinks],)))
        self._call([*self._ranks, *self._engines], calls)

    def _call(self, processes: Sequence[Process], calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Call a method of each process, all at the same time."""
        pending = [(p, p.actor.call.remote(name, *args)) for p, (name, args) in zip(processes, calls, strict=True)]
        return wait_all(pending, timeout_s=self._timeout_s, doing="opening the bridge for weights")
