"""Define the Ray actors of a run; each wraps the object that does the work, a `RankWorker` or a `VllmEngine`."""

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Concatenate

import psutil
import ray
from ray.exceptions import RayError

from megarl.cluster.ray_session import end_run_processes, is_alive
from megarl.cluster.remotes import MOST_RESULTS, Location, P, PendingCall, Process, R, in_group, results
from megarl.cluster.row_shards import RowShard
from megarl.cluster.stacks import write_stacks_on_signal
from megarl.host.device.platform import platform
from megarl.host.device.ranges import named_range
from megarl.host.sharing import adopt_umask
from megarl.host.stage import process_files, read_foreign
from megarl.host.streams import escape_unencodable, print_lines
from megarl.host.user_code import search_here_last
from megarl.parallel.worker import RankWorker
from megarl.rollout.engine import EngineReply, VllmEngine
from megarl.rollout.engine_node import EngineNodeWorkers
from megarl.rollout.engine_spec import EngineNode, EngineSpec
from megarl.types.messages import AccumulateRequest, ForwardRequest, ForwardResult, UpdateRequest, UpdateResult


def take_devices(device_ids: Sequence[str], *, binds: bool) -> None:
    """Restrict this process to the devices with these ids, if any are given; else it keeps those that Ray gave it.

    binds: also bind it to the CPUs and the memory next to them.
    """
    if device_ids:
        platform().select_devices(device_ids)
    if binds:
        platform().bind_near(device_ids or ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


class RunActor:
    """The base class of a run's Ray actors, which report where they run and which worker processes they have lost."""

    concurrency_groups: ClassVar[Mapping[str, int]] = {}
    # The kind of process that it is forked from, where there is one; see `cluster.preload`.
    preloaded: ClassVar[str] = ""

    def __init__(self) -> None:
        escape_unencodable()
        search_here_last()
        adopt_umask()
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
        """Return the indices of this actor's worker processes that have died. An answer shows that the actor lives."""
        return []

    def read_foreign(self) -> dict[str, int]:
        """Return how many connections each kind of listener of the run on this host has closed that were not its."""
        return read_foreign()

    def close(self) -> None:
        """End what this actor has started."""


class RankActor(RunActor):
    """A Ray actor with one trainer rank. It is synchronous, so that Megatron stays on the actor's main thread."""

    preloaded = "rank"

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.worker = RankWorker(rank)

    def prepare(self, device_ids: Sequence[str], *, binds: bool) -> None:
        """Call `RankWorker.prepare`, after `take_devices`."""
        take_devices(device_ids, binds=binds)
        self.worker.prepare()

    def call(self, method: Callable[Concatenate[RankWorker, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        with named_range(method.__name__):
            return method(self.worker, *args, **kwargs)

    def forward(
        self, shard: RowShard, micro_batches: Sequence[Sequence[int]], request: ForwardRequest
    ) -> ForwardResult | None:
        """Call `RankWorker.forward` with the rows of its data-parallel replica."""
        with named_range(f"forward {request.role}"):
            return self.worker.forward(shard.fetch(), micro_batches, request)

    def accumulate(
        self, shard: RowShard, micro_batches: Sequence[Sequence[int]], request: AccumulateRequest
    ) -> UpdateResult | None:
        """Call `RankWorker.accumulate` with the rows of its data-parallel replica."""
        with named_range(f"accumulate {request.role}"):
            return self.worker.accumulate(shard.fetch(), micro_batches, request)

    def update(
        self, shard: RowShard, micro_batches: Sequence[Sequence[int]], request: UpdateRequest
    ) -> UpdateResult | None:
        """Call `RankWorker.update` with the rows of its data-parallel replica."""
        with named_range(f"update {request.role}"):
            return self.worker.update(shard.fetch(), micro_batches, request)

    def close(self) -> None:
        self.worker.close()


# The concurrency groups of calls that run beside the actor's other calls, which run one after the other.
_GENERATION, _WATCH = "generation", "watch"


class EngineNodeActor(RunActor):
    """A Ray actor with what one node has of a vLLM engine. Whatever it does, it says at once if it has lost workers."""

    concurrency_groups: ClassVar[Mapping[str, int]] = {_WATCH: 1}
    preloaded = "engine"
    engine: VllmEngine | EngineNodeWorkers

    def __init__(self) -> None:
        super().__init__()
        self._workers: list[psutil.Process] = []

    def start(self, spec: EngineSpec, device_ids: Sequence[str], predecessor: Sequence[int] = ()) -> list[int]:
        """Build this node's part, on `device_ids` if any are given; return the ids of its processes, this one first.

        predecessor: process ids of a dead engine in this place. They are killed first, as its workers may hold memory.
        """
        end_run_processes(predecessor)
        take_devices(device_ids, binds=spec.binds)
        if spec.node is not None:
            # vLLM would otherwise look for the address by which it reaches the internet.
            os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
        self.engine = VllmEngine(spec) if spec.node is None or spec.node.rank == 0 else EngineNodeWorkers(spec)
        ids = self.engine.process_ids()
        self._workers = [psutil.Process(pid) for pid in ids[1:]]
        return ids

    @in_group(_WATCH)
    def lost_workers(self) -> list[int]:
        return [i for i, worker in enumerate(self._workers) if not is_alive(worker)]

    def close(self) -> None:
        self.engine.close()


class EngineActor(EngineNodeActor):
    """A Ray actor with one vLLM engine. While `serve` generates, it still answers other calls, such as weight syncs.

    `further`, given to the constructor: the processes on other nodes that hold the rest of the engine.
    """

    concurrency_groups: ClassVar[Mapping[str, int]] = {_GENERATION: 1, _WATCH: 1}
    engine: VllmEngine

    def __init__(self, further: Sequence[Process[EngineNodeActor]] = ()) -> None:
        super().__init__()
        self._further = further
        # How many processes each further node has.
        self._counts: list[int] = []

    def locate(self) -> Location:
        """Return where this process runs, and the hosts of the engine's other nodes."""
        others = results([node.ask(EngineNodeActor.locate) for node in self._further])
        return replace(super().locate(), further_hosts=tuple(other.host for other in others))

    def start_all(
        self, spec: EngineSpec, device_ids: Sequence[Sequence[str]], predecessors: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Call `start` on each of the engine's nodes, this one first, and return the ids of the processes of each.

        device_ids, predecessors: what each node's `start` is given.
        """
        if not self._further:
            return [self.start(spec, device_ids[0], predecessors[0])]
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        address, num_nodes = ray.util.get_node_ip_address(), len(self._further) + 1
        specs = [
            replace(spec, node=EngineNode(rank=rank, num_nodes=num_nodes, address=address, port=port))
            for rank in range(num_nodes)
        ]
        first, *others = zip(specs, device_ids, predecessors, strict=True)
        started = [node.ask(EngineNodeActor.start, *each) for node, each in zip(self._further, others, strict=True)]
        threading.Thread(target=_end_unless, args=(started,), daemon=True).start()
        ids = [self.start(*first), *results(started)]
        self._counts = [len(here) for here in ids[1:]]
        return ids

    @in_group(_WATCH)
    def lost_workers(self) -> list[int]:
        """Return the lost workers of all nodes; of a node that is lost its process, which counts as a worker.

        It waits for the other nodes: if one hangs, so does the engine.
        """
        lost, first = super().lost_workers(), len(self._workers)
        for node, count in zip(self._further, self._counts, strict=False):
            try:
                (its_lost,) = results([node.ask(EngineNodeActor.lost_workers)])
                lost += [first + 1 + i for i in its_lost]
            except RayError:
                lost.append(first)
            first += count
        return lost

    def call(self, method: Callable[Concatenate[VllmEngine, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.engine, *args, **kwargs)

    def close(self) -> None:
        """End this part of the engine, and those on its other nodes."""
        super().close()
        results([node.ask(EngineNodeActor.close) for node in self._further])

    @in_group(_GENERATION)
    def serve(self) -> Iterator[EngineReply]:
        """Yield the next replies of `VllmEngine.serve`."""
        # Ray sends values to generators, which `yield from` would pass on.
        for reply in itertools.islice(self.engine.serve(), MOST_RESULTS):  # noqa: UP028
            yield reply


def _end_unless(started: Sequence[PendingCall[list[int]]]) -> None:
    """End this process if another node of its engine cannot start: the engine would wait for its workers."""
    try:
        results(started)
    except RayError as error:
        print_lines(f"another node of this engine could not start: {error}", file=sys.stderr)
        os._exit(1)
