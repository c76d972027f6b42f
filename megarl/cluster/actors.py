"""Define the Ray actors of a run; each wraps the object that does the work, a `PolicyWorker` or a `VllmEngine`."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import psutil
import ray

from megarl.cluster.roster import Location
from megarl.cluster.stacks import stacks_directory, write_stacks_on_signal
from megarl.cluster.workers import RowShards
from megarl.device.platform import platform
from megarl.host.janitor import RUN_ID_VARIABLE
from megarl.parallel.worker import PolicyWorker
from megarl.rollout.engine import Completion, EngineSpec, VllmEngine

# How long to wait for killed processes to be gone.
END_TIMEOUT_S = 10.0


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
            stacks=str(stacks_directory()),
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


# The concurrency group of calls that run beside the actor's other calls, which run one after the other.
_GENERATION = "generation"


class EngineActor(RunActor):
    """A Ray actor with one vLLM engine. While `serve` generates, it still answers other calls, such as weight syncs."""

    concurrency_groups: ClassVar[Mapping[str, int]] = {_GENERATION: 1}

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

    def lost_workers(self) -> list[int]:
        return [i for i, worker in enumerate(self._workers) if not _is_alive(worker)]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)

    @ray.method(concurrency_group=_GENERATION)
    def serve(self) -> Iterator[dict[int, Completion]]:
        """Yield completions from `VllmEngine.serve`. The remote call must set num_returns="streaming"."""
        yield from self.engine.serve()


def end_run_processes(pids: Sequence[int]) -> None:
    """Kill the given processes of this host, if they still live and belong to this run, and wait for their end."""
    run_id = os.environ.get(RUN_ID_VARIABLE)
    mine = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            if process.environ().get(RUN_ID_VARIABLE) == run_id:
                process.kill()
                mine.append(process)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(map(_is_alive, mine)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process lives. A zombie counts as dead, although psutil's `is_running` returns True for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
