"""Remote processes that stand in for ranks and engines: Ray is real, the work is not."""

import asyncio
import contextlib
import gc
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorHandleNotFoundError

from megarl.cluster.engines import EngineGroup
from megarl.cluster.processes import locate
from megarl.cluster.ray_session import _wait_for_port
from megarl.cluster.remotes import Location, PendingCall, Process
from megarl.cluster.row_shards import RowShard
from megarl.cluster.stacks import write_stacks_on_signal
from megarl.config.generation import Sampling
from megarl.errors import NonFiniteError
from megarl.host import loop
from megarl.host.stage import process_files
from megarl.rollout.engine import Completion, EngineReply, GenerationRequest
from megarl.rollout.source import Doing, generating
from megarl.rollout.stepping import EngineLoad
from megarl.types import FinishReason, version_spans
from megarl.types.messages import (
    ForwardRequest,
    ForwardResult,
    LoadRequest,
    Role,
    StoreResult,
    UpdateRequest,
    UpdateResult,
)

# Ray's runtime environment of processes that are forked, where there is a server.
runtime_env: dict[str, object] = {}
NO_LOAD = EngineLoad(kv_tokens=0, written={}, cost=None)


class Worker:
    """Stands in for a rank or an engine: does as it is told, slowly if asked to."""

    def __init__(self, index: int) -> None:
        self.index, self.num_asked, self.workers = index, 0, list[int]()
        self.added: queue.Queue[Mapping[int, GenerationRequest]] = queue.Queue()
        self.may_die = threading.Event()
        write_stacks_on_signal()

    def locate(self) -> Location:
        host, files = ray.get_runtime_context().get_node_id(), str(process_files())
        return Location(host=host, address="", device_ids=(), pid=os.getpid(), files=files)

    def lost_workers(self) -> list[int]:
        self.num_asked += 1
        return self.workers

    def times_asked(self) -> int:
        return self.num_asked

    def lose(self, worker: int) -> None:
        self.workers = [worker]

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what this class has under the name of a rank's or an engine's method."""
        return getattr(self, method.__name__)(*args, **kwargs)

    def answer(self, after_s: float) -> int:
        time.sleep(after_s)
        return self.index

    def fail(self, error: Exception, after_s: float) -> None:
        time.sleep(after_s)
        raise error

    def die(self, after_s: float) -> None:
        time.sleep(after_s)
        os._exit(1)

    def wait_for_port(self) -> None:
        """Code of megarl that takes long: nothing listens there."""
        _wait_for_port("127.0.0.1:1", time.monotonic() + 60.0)

    # --- as a rank

    def load(self, request: LoadRequest) -> None:
        """Nothing to load."""

    def forward(self, shard: RowShard, micro_batches: Any, _: ForwardRequest | None = None) -> ForwardResult | None:
        """[replica, first token] for every row, and that negated, from the first rank of each replica."""
        rows = shard.fetch()
        values = {i: np.asarray([self.index // 2, rows[i].token_ids[0]], np.float32) for b in micro_batches for i in b}
        quantities = {"logprobs": values, "entropy": {i: -array for i, array in values.items()}}
        return ForwardResult(quantities=quantities) if self.index % 2 == 0 else None

    def update(self, shard: RowShard, micro_batches: Any, request: UpdateRequest) -> UpdateResult | None:
        result = self.forward(shard, micro_batches)
        return (
            None if result is None else UpdateResult(metrics={"lr": request.lr}, before=result.quantities["logprobs"])
        )

    def store_weights(
        self, files: Sequence[str], *, with_checksums: bool, role: Role, gradients: bool = False
    ) -> StoreResult:
        assert role is Role.CRITIC
        sums = {"w": 2**63 + self.index} if with_checksums else {}
        return StoreResult(num_elements={"w": 10, f"w{self.index}": 1}, checksums=sums)

    # --- as an engine

    def add(self, requests: Mapping[int, GenerationRequest]) -> None:
        self.added.put(requests)

    def allow_death(self) -> None:
        self.may_die.set()

    @ray.method(concurrency_group="generation")
    def serve(self) -> Iterator[EngineReply]:
        """The last request first. A request for no tokens kills the engine as soon as it may die, one for -1 fails."""
        while True:
            for key, request in reversed(self.added.get().items()):
                time.sleep(0.1 * (2 - self.index % 3))
                if request.max_tokens == 0:
                    self.may_die.wait()
                    os._exit(1)
                if request.max_tokens < 0:
                    raise NonFiniteError("weights are spoiled")
                completion = Completion(
                    token_ids=np.asarray([request.seed, self.index]),
                    logprobs=np.zeros(2, np.float32),
                    finish_reason=FinishReason.STOP,
                    versions=version_spans(np.zeros(2, np.int64)),
                )
                yield EngineReply(load=NO_LOAD, completions={key: completion})


class Watched(Worker):
    """Says whether it lives while it does other things."""

    @ray.method(concurrency_group="watch")
    def lost_workers(self) -> list[int]:
        return super().lost_workers()


def start(index: int, cls: type[Worker] = Worker, *, name: str = "") -> Process[Worker]:
    groups = {"generation": 1, "watch": 1}
    actor = ray.remote(concurrency_groups=groups)(cls).options(num_cpus=0.5, runtime_env=runtime_env)
    return Process(name=name or f"trainer rank {index}", actor=actor.remote(index))


_started: list[Process[Worker]] = []


def start_run(*names: str, watched_s: float | None = None) -> list[Process[Worker]]:
    """Processes of one run, who know of each other. Those of earlier ones, which did too, end now.

    watched_s: engines answer while they work, and count as hung if they are silent for so long.
    """
    while _started:
        # An engine serves without end. Those of another session of Ray have ended with it.
        with contextlib.suppress(ActorHandleNotFoundError):
            ray.kill(_started.pop().actor)
    gc.collect()
    classes = [Watched if watched_s and name.startswith("engine") else Worker for name in names]
    found = locate([start(i, classes[i], name=name) for i, name in enumerate(names)], timeout_s=120.0)
    for process, cls in zip(found, classes, strict=True):
        if watched_s and cls is Watched:
            process.roster.expect_answers(process, within_s=watched_s)
    _started.extend(found)
    return found


def kill_after(delay_s: float, process: Process[Worker]) -> None:
    threading.Timer(delay_s, os.kill, (process.location.pid, signal.SIGKILL)).start()


def calls(processes: Sequence[Process[Worker]], *requests: tuple[Any, ...]) -> list[PendingCall[Any]]:
    return [p.ask(getattr(Worker, name), *args) for p, (name, *args) in zip(processes, requests, strict=False)]


def request(seed: int, *, max_tokens: int = 2) -> GenerationRequest:
    return GenerationRequest(token_ids=(seed,), seed=seed, sampling=Sampling(temperature=1.0), max_tokens=max_tokens)


def collected(group: EngineGroup, requests: Sequence[GenerationRequest]) -> dict[int, list[int]]:
    """Tokens by position, in the order in which they came."""
    found = ask(group, requests)
    attend_until(group, lambda: len(found) == len(requests))
    return found


def ask(group: EngineGroup, requests: Sequence[GenerationRequest]) -> dict[int, list[int]]:
    """Tokens by position, filled as they come while something is waited for."""
    found: dict[int, list[int]] = {}

    async def take(i: int, completion: "asyncio.Future[Completion]") -> None:
        found[i] = (await completion).token_ids.tolist()

    for i, each in enumerate(requests):
        loop.spawn(take(i, group.generate(each)))
    return found


def attend_until(
    group: EngineGroup, until: Callable[[], bool], *, timeout_s: float = 120.0, doing: Doing = generating
) -> None:
    """Wait as a supervisor does which replaces nothing but hosts."""

    async def met() -> None:
        while not until():
            await asyncio.sleep(0.005)

    work = loop.spawn(met())
    try:
        while not work.done():
            loop.wait(group.attend(work, timeout_s=timeout_s, doing=doing))
            group.trouble.clear()
            if group.environment_workers is not None:
                group.environment_workers.mend()
    finally:
        work.cancel()
