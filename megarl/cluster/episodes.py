"""Keep the processes that run environments: deal conversations to them, pass replies on, and replace those that die."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.actors import RunActor
from megarl.cluster.processes import locate, take_ready, wait_all
from megarl.cluster.roster import Process
from megarl.environments.host import EpisodeHost, HostReply, HostSpec, StartRequest, TurnRequest, sendable
from megarl.errors import EngineDiedError
from megarl.host.child_environment import limit_environment
from megarl.rollout.conversations import OnLost, OnReply

# A host whose event loop does not turn for so long counts as hung: an environment blocks it.
SILENCE_S = 30.0


class EpisodeHostActor(RunActor):
    """A Ray actor with an event loop, in which it runs the environments of many conversations."""

    async def start(self, spec: HostSpec) -> None:
        """Load the environments and the tokenizer. Raises ConfigError as `EpisodeHost` does."""
        # Tools and agents may be functions, which this process calls.
        limit_environment(spec.config.pass_env, key="environment.pass_env")
        self._host = EpisodeHost(spec)
        self._replies: asyncio.Queue[tuple[int, HostReply]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, method: str, *args: Any) -> None:
        """Take requests: `begin` and `act` with requests by key, `end` with keys, or `close`, which ends nothing."""
        for key, request in args[0].items() if args else ():
            self._spawn(getattr(self, f"_{method}")(key, request))

    async def _begin(self, key: int, request: StartRequest) -> None:
        await self._replies.put((key, sendable(await self._host.start(key, request))))

    async def _act(self, key: int, request: TurnRequest) -> None:
        await self._replies.put((key, sendable(await self._host.act(key, request))))

    async def _end(self, key: int, _: None) -> None:
        await self._host.close(key)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # The loop itself keeps no reference to a task.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def serve(self) -> AsyncIterator[dict[int, HostReply]]:
        """Yield replies by key as they come. The remote call must set num_returns="streaming"."""
        while True:
            part = dict([await self._replies.get()])
            while not self._replies.empty():
                part |= [self._replies.get_nowait()]
            yield part


@dataclass(frozen=True, slots=True)
class _Open:
    """A conversation at a host. tell: told of the reply that the host owes, if it owes one."""

    host: int
    lost: OnLost
    tell: OnReply | None


class EpisodeHosts:
    """The processes (hosts) in which a run's environments live, each with an equal share of the conversations.

    Requests to hosts are queued, and sent at the next call of `calls`, `take` or `poll`. `mend` replaces hosts that
    have died; their conversations are reported as lost.
    """

    def __init__(self, spec: HostSpec, *, timeout_s: float) -> None:
        """Start the hosts on the driver's host, and wait for them. Raises ConfigError as `EpisodeHost` does."""
        self._spec, self._timeout_s = spec, timeout_s
        self._keys = itertools.count()
        self._open: dict[int, _Open] = {}
        self._outbox: list[tuple[int, str, int, Any]] = []
        actors = {f"environment host {i}": self._create() for i in range(spec.config.hosts)}
        self.processes = locate(actors, timeout_s=timeout_s)
        names = [process.name for process in self.processes]
        self.processes[0].roster.allow_restarts(names, spec.config.max_host_restarts)
        self._streams = self._begin(self.processes)

    def start(self, request: StartRequest, tell: OnReply, lost: OnLost) -> int:
        key = next(self._keys)
        self._open[key] = _Open(key % len(self.processes), lost, tell)
        self._post("begin", key, request)
        return key

    def act(self, key: int, request: TurnRequest, tell: OnReply) -> None:
        known = self._open[key]
        self._open[key] = _Open(known.host, known.lost, tell)
        self._post("act", key, request)

    def end(self, key: int) -> None:
        self._post("end", key, None)
        del self._open[key]

    def are_idle(self) -> bool:
        """Return whether no host owes a reply."""
        return all(each.tell is None for each in self._open.values())

    def calls(self) -> list[tuple[Process, Any]]:
        """Send what was collected, and return each host's stream of replies, for a wait."""
        self.flush()
        return list(zip(self.processes, self._streams, strict=True))

    def take(self, part: Mapping[int, HostReply]) -> None:
        """Pass replies on, and end hosts that are worn out. Raises WorkerError if such a host may not be replaced."""
        worn_out: dict[int, str] = {}
        for key, reply in part.items():
            if (each := self._open.get(key)) is not None and each.tell is not None:
                self._open[key] = _Open(each.host, each.lost, None)
                each.tell(reply)
                if reply.worn_out:
                    worn_out[each.host] = reply.worn_out
        self.flush()
        for host, why in worn_out.items():
            process = self.processes[host]
            error = process.roster.report_death(process, f"{process.name} is worn out: {why}")
            if not isinstance(error, EngineDiedError):
                raise error

    def poll(self) -> None:
        """Pass replies on that have come, without waiting."""
        self.flush()
        streams = [s for s in self._streams if isinstance(s, ray.ObjectRefGenerator)]
        for place, failed in take_ready(streams, self.take).items():
            self._streams[self._streams.index(streams[place])] = failed

    def mend(self) -> None:
        """Replace hosts that have died; conversations that they had are told so."""
        roster = self.processes[0].roster
        lost = [i for i, process in enumerate(self.processes) if process.name in roster.lost]
        if not lost:
            return
        names = [self.processes[i].name for i in lost]
        located = locate({name: self._create() for name in names}, timeout_s=self._timeout_s)
        fresh = [Process(name=p.name, actor=p.actor, location=p.location, roster=roster) for p in located]
        for i, process, stream in zip(lost, fresh, self._begin(fresh), strict=True):
            roster.enter(process)
            self.processes[i], self._streams[i] = process, stream
        self._outbox = [each for each in self._outbox if each[0] not in lost]
        gone = {key: each for key, each in self._open.items() if each.host in lost}
        for key, each in gone.items():
            del self._open[key]
            each.lost(each.tell is not None)

    def flush(self) -> None:
        """Send the requests that were collected, in one call for each host and kind."""
        posted, self._outbox = self._outbox, []
        batches: dict[tuple[int, str], dict[int, Any]] = {}
        for host, method, key, request in posted:
            batches.setdefault((host, method), {})[key] = request
        for (host, method), requests in batches.items():
            self.processes[host].actor.call.remote(method, requests)

    def close(self) -> None:
        """End the hosts, and forget all conversations."""
        self._open.clear()
        for process in self.processes:
            process.roster.living.pop(process.name, None)
            ray.kill(process.actor)

    def _post(self, method: str, key: int, request: Any) -> None:
        self._outbox.append((self._open[key].host, method, key, request))

    def _create(self) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote = ray.remote(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)(EpisodeHostActor)
        return remote.remote()

    def _begin(self, processes: Sequence[Process]) -> list[Any]:
        """Start the episode hosts in these processes, and return each host's stream of replies."""
        calls = [(process, process.actor.start.remote(self._spec)) for process in processes]
        wait_all(calls, timeout_s=self._timeout_s, doing="starting the hosts of environments")
        for process in processes:
            process.roster.expect_answers(process, within_s=SILENCE_S)
        return [process.actor.serve.options(num_returns="streaming").remote() for process in processes]
