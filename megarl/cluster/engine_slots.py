"""Start each engine in its reserved place on the cluster, and start a new engine there when one has died."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import ray

from megarl.cluster.actors import EngineActor, EngineNodeActor, RunActor
from megarl.cluster.placement import ProcessSlot
from megarl.cluster.processes import wait_all
from megarl.cluster.remotes import PendingCall, Process, R
from megarl.cluster.reservation import Reservation
from megarl.cluster.stacks import describe
from megarl.config.schema import ClusterConfig
from megarl.host import loop
from megarl.host.clock import awake_s
from megarl.host.streams import print_lines
from megarl.rollout.engine import VllmEngine
from megarl.rollout.engine_spec import EngineSpec

# How often a wait for engines says what they do, and of how many.
PROGRESS_S = 60.0
NUM_TOLD = 4


A = TypeVar("A", bound=RunActor)


def create_process(name: str, cls: type[A], reservation: Reservation, slot: ProcessSlot, *args: object) -> Process[A]:
    """Create a Ray actor in the place that is reserved for it (`ProcessSlot`), and return without waiting for its
    start.
    """
    remote = ray.remote(concurrency_groups=dict(cls.concurrency_groups))(cls)
    options = reservation.options(slot, cls.preloaded)
    return Process(name=name, actor=remote.options(**options).remote(*args))


def wait_started(
    starting: Sequence[PendingCall[list[list[int]]]], *, timeout_s: float, doing: str, every_s: float = PROGRESS_S
) -> list[list[list[int]]]:
    """Wait until engines have started, and return the ids of each one's processes by node. Raises the errors of
    `wait_all`.

    Every `every_s` seconds, it says on stderr which engines are still starting, and what they do.
    """
    began = awake_s()

    async def tell() -> None:
        while True:
            await asyncio.sleep(every_s)
            ready = ray.wait([call.ref for call in starting], num_returns=len(starting), timeout=0)[0]
            slow = {call.process.name: call.process.location for call in starting if call.ref not in ready}
            count = f"{len(ready)} of {len(starting)} after {awake_s() - began:.0f} s"
            doings = describe(dict(itertools.islice(slow.items(), NUM_TOLD)))
            print_lines(f"{doing}: {count}; {doings}", file=sys.stderr)

    telling = loop.spawn(tell())
    try:
        return wait_all(starting, timeout_s=timeout_s, doing=doing)
    finally:
        telling.cancel()


class EngineSlots:
    """Starts an engine in each place (slot) that is reserved for the run's engines, and another one if it dies."""

    def __init__(
        self,
        spec: EngineSpec,
        cluster: ClusterConfig,
        slots: Sequence[ProcessSlot],
        reservation: Reservation,
        devices_of: Callable[[ProcessSlot], list[str]],
    ) -> None:
        """Keep the slots; engines start with `begin`.

        devices_of: returns ids of the devices that an engine shares with trainer ranks. It is called when the engine
            starts, by which time the ranks must have started.
        """
        self._spec, self._cluster, self._devices_of = spec, cluster, devices_of
        self._slots, self._reservation = list(slots), reservation
        # By engine: the processes on its further nodes, and the ids of all its processes by node.
        self._further: dict[int, list[Process[EngineNodeActor]]] = {}
        self._pids: dict[int, list[list[int]]] = {}

    @property
    def shares(self) -> list[tuple[int, ...]]:
        """Return, for each engine, the trainer ranks whose devices it uses."""
        return [slot.all_shares for slot in self._slots]

    def create(self) -> list[Process[EngineActor]]:
        """Create the actors of all engines."""
        return [self._create(i, f"engine {i}") for i in range(len(self._slots))]

    def _create(self, index: int, name: str) -> Process[EngineActor]:
        first, reservation = self._slots[index], self._reservation
        self._further[index] = [
            create_process(f"{name} node {node}", EngineNodeActor, reservation, slot)
            for node, slot in enumerate(first.further, start=1)
        ]
        return create_process(name, EngineActor, reservation, first, self._further[index])

    def begin(self, index: int, process: Process[EngineActor]) -> PendingCall[list[list[int]]]:
        """Make an engine start after killing the processes of the one before it, and return the pending remote call."""
        slots = [self._slots[index], *self._slots[index].further]
        devices, predecessors = [self._devices_of(slot) for slot in slots], self._pids.get(index, [[]] * len(slots))
        return process.ask(EngineActor.start_all, self._spec, devices, predecessors)

    def started(self, index: int, process: Process[EngineActor], pids: list[list[int]]) -> dict[str, int]:
        """Note that an engine has started, with which processes on each node; return their ids by name:
        `engine 0`, then `engine 0 worker 0`, …
        """
        self._pids[index] = pids
        # From now on, it counts as hung whenever it is silent for this long.
        process.roster.expect_answers(process, within_s=self._cluster.heartbeat_timeout_s)
        pid, *workers = itertools.chain(*pids)
        return {process.name: pid} | {f"{process.name} worker {i}": worker for i, worker in enumerate(workers)}

    def restart(self, index: int, lost: Process[EngineActor]) -> tuple[Process[EngineActor], dict[str, int]]:
        """Start a new engine in the place of a dead one; return it and its process ids by name.

        The new engine has the weights on disk, not the policy's. With placement.offload it is put to sleep; the other
        engines must be asleep already.
        """
        for node in self._further[index]:
            ray.kill(node.actor)
        process = replace(lost, actor=self._create(index, lost.name).actor)
        process.roster.enter(process)
        process = replace(process, location=self._answer(process.ask(EngineActor.locate)))
        process.roster.enter(process)
        doing, starting = f"restarting {process.name}", self.begin(index, process)
        (pids,) = wait_started([starting], timeout_s=self._cluster.engine_start_timeout_s, doing=doing)
        new_pids = self.started(index, process, pids)
        if self._spec.can_sleep:
            self._answer(process.call(VllmEngine.sleep))
        return process, new_pids

    def _answer(self, call: PendingCall[R]) -> R:
        timeout_s = self._cluster.start_timeout_s
        (answer,) = wait_all([call], timeout_s=timeout_s, doing=f"restarting {call.process.name}")
        return answer
