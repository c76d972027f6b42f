"""Keep the processes that run environments: deal conversations to them, pass replies on, and replace those that die."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.actors import RunActor
from megarl.cluster.processes import explained, is_replaceable, locate, wait_all
from megarl.cluster.roster import Process
from megarl.environments.host import EpisodeHost, HostReply, HostSpec, StartRequest, TurnRequest, sendable
from megarl.errors import EngineDiedError
from megarl.host import loop
from megarl.host.child_environment import limit_environment
from megarl.rollout.conversations import HostLostError, Talk

# A host whose event loop does not turn for so long counts as hung: an environment blocks it.
SILENCE_S = 30.0
DOING = "conversing with environments"


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


class EpisodeHosts:
    """The processes (hosts) in which a run's environments live, each with an equal share of the conversations.

    Requests leave with all others of the same turn of the loop. Replies come in one stream for each host, which a task
    reads during every wait. trouble: set when a host has died; `mend` then replaces it, and tells its conversations.
    """

    def __init__(self, spec: HostSpec, *, timeout_s: float, trouble: asyncio.Event) -> None:
        """Start the hosts on the driver's host, and wait for them. Raises ConfigError as `EpisodeHost` does."""
        self._spec, self._timeout_s, self._trouble = spec, timeout_s, trouble
        self.heard_at = 0.0
        self._keys = itertools.count()
        self._open: dict[int, Talk] = {}
        self._outbox: list[tuple[int, str, int, Any]] = []
        actors = {f"environment host {i}": self._create() for i in range(spec.config.hosts)}
        self.processes = locate(actors, timeout_s=timeout_s)
        names = [process.name for process in self.processes]
        self.processes[0].roster.allow_restarts(names, spec.config.max_host_restarts)
        self._begin(range(len(names)))

    def start(self, request: StartRequest) -> Talk:
        key = next(self._keys)
        talk = self._open[key] = Talk(key=key, host=key % len(self.processes), reply=loop.event_loop().create_future())
        self._post("begin", talk, request)
        return talk

    def act(self, talk: Talk, request: TurnRequest) -> None:
        talk.reply = loop.event_loop().create_future()
        self._post("act", talk, request)

    def end(self, talk: Talk) -> None:
        self._post("end", talk, None)
        del self._open[talk.key]

    def busy(self) -> list[Process]:
        """List the hosts that owe a reply."""
        hosts = {talk.host for talk in self._open.values() if not talk.reply.done()}
        return [process for i, process in enumerate(self.processes) if i in hosts]

    def mend(self) -> None:
        """Replace hosts that have died; conversations that they had are lost."""
        roster = self.processes[0].roster
        lost = [i for i, process in enumerate(self.processes) if process.name in roster.lost]
        if not lost:
            return
        names = [self.processes[i].name for i in lost]
        located = locate({name: self._create() for name in names}, timeout_s=self._timeout_s)
        for i, each in zip(lost, located, strict=True):
            self.processes[i] = Process(name=each.name, actor=each.actor, location=each.location, roster=roster)
            roster.enter(self.processes[i])
        self._begin(lost)
        self._outbox = [each for each in self._outbox if each[0] not in lost]
        for talk in [talk for talk in self._open.values() if talk.host in lost]:
            del self._open[talk.key]
            talk.is_lost = True
            if not talk.reply.done():
                talk.reply.set_exception(HostLostError())

    def close(self) -> None:
        """End the hosts, and forget all conversations."""
        for talk in self._open.values():
            talk.reply.cancel()
        self._open.clear()
        for process in self.processes:
            process.roster.living.pop(process.name, None)
            ray.kill(process.actor)
        self.processes.clear()

    def _post(self, method: str, talk: Talk, request: Any) -> None:
        if not self._outbox:
            loop.event_loop().call_soon(self._flush)
        self._outbox.append((talk.host, method, talk.key, request))

    def _flush(self) -> None:
        """Send the requests that were collected, in one call for each host and kind."""
        posted, self._outbox = self._outbox, []
        batches: dict[tuple[int, str], dict[int, Any]] = {}
        for host, method, key, request in posted:
            batches.setdefault((host, method), {})[key] = request
        for (host, method), requests in batches.items():
            self.processes[host].actor.call.remote(method, requests)

    async def _read(self, process: Process, stream: Any) -> None:
        """Take the replies of a host's stream, until the host dies."""
        try:
            async for part in stream:
                self._take(process, await part)
        except RayError as error:
            if process not in self.processes:
                return
            if not await is_replaceable(process, error, DOING):
                raise await explained(process, error, {}, DOING) from None
            self._trouble.set()

    def _take(self, process: Process, part: Mapping[int, HostReply]) -> None:
        """Pass replies on, and end a host that is worn out. Raises WorkerError if it may not be replaced."""
        self.heard_at = time.monotonic()
        for key, reply in part.items():
            if (talk := self._open.get(key)) is not None and not talk.reply.done():
                talk.reply.set_result(reply)
        if worn_out := [reply.worn_out for reply in part.values() if reply.worn_out]:
            error = process.roster.report_death(process, f"{process.name} is worn out: {worn_out[-1]}")
            if not isinstance(error, EngineDiedError):
                raise error

    def _create(self) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote = ray.remote(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)(EpisodeHostActor)
        return remote.remote()

    def _begin(self, hosts: Sequence[int]) -> None:
        """Start the episode hosts in these processes, and begin to read each one's stream of replies."""
        processes = [self.processes[i] for i in hosts]
        calls = [(process, process.actor.start.remote(self._spec)) for process in processes]
        wait_all(calls, timeout_s=self._timeout_s, doing="starting the hosts of environments")
        for process in processes:
            process.roster.expect_answers(process, within_s=SILENCE_S)
            stream = process.actor.serve.options(num_returns="streaming").remote()
            loop.spawn(self._read(process, stream))
