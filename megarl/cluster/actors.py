"""Define the Ray actors of a run; each wraps the object that does the work, a `PolicyWorker` or a `VllmEngine`."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import psutil
import ray

from megarl.cluster.ending import end_run_processes, is_alive
from megarl.cluster.roster import Location
from megarl.cluster.stacks import write_stacks_on_signal
from megarl.cluster.workers import RowShards
from megarl.device.platform import platform
from megarl.host.stage import process_files
from megarl.parallel.worker import PolicyWorker
from megarl.rollout.engine import Completion, VllmEngine
from megarl.rollout.engine_spec import EngineSpec


class RunActor:
    """The base class of a run's Ray actors, which report where they run and which worker processes they have lost."""

    concurrency_groups: ClassVar[Mapping[str, int]] = {}

    def __init__(self) -> None:
        write_stacks_on_signal()

    def locate(self) -> Location:
        """Return the host, address, devices and process id of this process."""
        context = ray.get_runtime_context()
        return Location(
            host=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            device_ids=tuple(context.get_accelerator_ids().get("GPU", ())),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            files=str(process_files()),
        )

    def lost_workers(self) -> list[int]:
        """Return the indices of this actor's worker processes that have died. Any answer also shows that the actor
        itself lives.
        """
        return []


class RankActor(RunActor):
    """A Ray actor with one trainer rank. It is synchronous, so that Megatron stays on the actor's main thread."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.worker = PolicyWorker(rank)

    def prepare(self, device_ids: Sequence[str]) -> str:
        """Call `PolicyWorker.prepare`; if device ids are given, first restrict this process to those devices."""
        if device_ids:
            platform().select_devices(device_ids)
        return self.worker.prepare()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)

    def call_with_rows(self, method: str, shards: RowShards, micro_batches: Sequence[Sequence[int]], *args: Any) -> Any:
        """Fetch the rows whose indices the micro-batches list, and call a method of the `PolicyWorker` with them."""
        return getattr(self.worker, method)(shards.fetch(micro_batches), micro_batches, *args)


# The concurrency groups of calls that run beside the actor's other calls, which run one after the other.
_GENERATION, _WATCH = "generation", "watch"


class EngineActor(RunActor):
    """A Ray actor with one vLLM engine. While `serve` generates, it still answers other calls, such as weight syncs.

    Whatever it does, it says at once whether it has lost workers.
    """

    concurrency_groups: ClassVar[Mapping[str, int]] = {_GENERATION: 1, _WATCH: 1}

    def __init__(self) -> None:
        super().__init__()
        self._workers: list[psutil.Process] = []

    def start(self, spec: EngineSpec, device_ids: Sequence[str], predecessor: Sequence[int] = ()) -> list[int]:
        """Build the engine, on `device_ids` if any are given, and return the ids of its processes, this one first.

        predecessor: process ids of a dead engine in this place. They are killed first, as its workers may hold memory.
        """
        end_run_processes(predecessor)
        if device_ids:
            platform().select_devices(device_ids)
        self.engine = VllmEngine(spec)
        ids = self.engine.process_ids()
        self._workers = [psutil.Process(pid) for pid in ids[1:]]
        return ids

    @ray.method(concurrency_group=_WATCH)
    def lost_workers(self) -> list[int]:
        return [i for i, worker in enumerate(self._workers) if not is_alive(worker)]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)

    @ray.method(concurrency_group=_GENERATION)
    def serve(self) -> Iterator[dict[int, Completion]]:
        """Yield completions from `VllmEngine.serve`. The remote call must set num_returns="streaming"."""
        yield from self.engine.serve()
