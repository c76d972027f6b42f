"""Keep the processes that run environments: deal conversations to them, pass replies on, and replace those that die."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.actors import RunActor
from megarl.cluster.processes import explained, is_replaceable, locate, wait_all
from megarl.cluster.remotes import Process, Remote, Stream
from megarl.environments.host import EpisodeHost, HostReply, HostSpec, StartRequest, TriesRequest, TurnRequest, sendable
from megarl.errors import EngineDiedError
from megarl.host import loop
from megarl.host.child_environment import limit_environment
from megarl.host.clock import awake_s
from megarl.record import activity
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

    async def begin(self, requests: Mapping[int, StartRequest]) -> None:
        """Begin conversations, each by a key of the caller's; `serve` yields the replies."""
        for key, request in requests.items():
            self._spawn(self._reply(key, self._host.start(key, request)))

    async def act(self, requests: Mapping[int, TurnRequest | TriesRequest]) -> None:
        """Take turns of conversations by their keys; `serve` yields the replies."""
        for key, request in requests.items():
            self._spawn(self._reply(key, self._host.act(key, request)))

    async def end(self, keys: Collection[int]) -> None:
        """End conversations."""
        for key in keys:
            self._spawn(self._host.close(key))

    async def _reply(self, key: int, reply: Awaitable[HostReply]) -> None:
        await self._replies.put((key, sendable(await reply)))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        # The loop itself keeps no reference to a task.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def serve(self) -> AsyncIterator[dict[int, HostReply]]:
        """Yield replies by key as they come."""
        while True:
            part = dict([await self._replies.get()])
            while not self._replies.empty():
                part |= [self._replies.get_nowait()]
            yield part


@dataclass(frozen=True, slots=True)
class _Outbox:
    """The requests to one host that are not sent yet, by conversation, and the conversations to end."""

    begin: dict[int, StartRequest] = field(default_factory=dict)
    act: dict[int, TurnRequest | TriesRequest] = field(default_factory=dict)
    end: list[int] = field(default_factory=list)

    def send(self, process: Process[EpisodeHostActor]) -> None:
        """Send them, in one call for each kind."""
        if self.begin:
            process.ask(EpisodeHostActor.begin, self.begin)
        if self.act:
            process.ask(EpisodeHostActor.act, self.act)
        if self.end:
            process.ask(EpisodeHostActor.end, self.end)


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
        begun = [self._create(f"environment host {i}") for i in range(spec.config.hosts)]
        self.processes = locate(begun, timeout_s=timeout_s)
        # By host, the requests of this turn of the loop, or those that wait for a new host.
        self._outboxes: dict[int, _Outbox] = {}
        names = [process.name for process in self.processes]
        self.processes[0].roster.allow_restarts(names, spec.config.max_host_restarts)
        self._begin(self.processes)
        for process in self.processes:
            self._listen(process)

    def start(self, request: StartRequest) -> Talk:
        key = next(self._keys)
        talk = self._open[key] = Talk(key=key, host=key % len(self.processes), reply=loop.event_loop().create_future())
        self._outbox(talk).begin[key] = request
        return talk

    def act(self, talk: Talk, request: TurnRequest | TriesRequest) -> None:
        talk.reply = loop.event_loop().create_future()
        self._outbox(talk).act[talk.key] = request

    def end(self, talk: Talk) -> None:
        self._outbox(talk).end.append(talk.key)
        del self._open[talk.key]

    def busy(self) -> list[Process[Remote]]:
        """List the hosts that owe a reply."""
        hosts = {talk.host for talk in self._open.values() if not talk.reply.done()}
        return [process for i, process in enumerate(self.processes) if i in hosts]

    def mend(self) -> None:
        """Replace hosts that have died; conversations that they had are lost."""
        roster = self.processes[0].roster
        lost = [i for i, process in enumerate(self.processes) if process.name in roster.lost]
        if not lost:
            return
        for host in lost:
            self._outboxes.pop(host, None)
        for talk in [talk for talk in self._open.values() if talk.host in lost]:
            del self._open[talk.key]
            talk.is_lost = True
            if not talk.reply.done():
                talk.reply.set_exception(HostLostError())
        # Meanwhile conversations begin again, and their requests wait for the new hosts.
        located = locate([self._create(self.processes[i].name) for i in lost], timeout_s=self._timeout_s)
        fresh = [replace(process, roster=roster) for process in located]
        self._begin(fresh)
        for i, process in zip(lost, fresh, strict=True):
            roster.enter(process)
            self.processes[i] = process
            self._listen(process)
        self._flush()

    def close(self) -> None:
        """End the hosts, and forget all conversations."""
        for talk in self._open.values():
            talk.reply.cancel()
        self._open.clear()
        for process in self.processes:
            process.roster.living.pop(process.name, None)
            ray.kill(process.actor)
        self.processes.clear()

    def _outbox(self, talk: Talk) -> _Outbox:
        if talk.host not in self._outboxes:
            self._outboxes[talk.host] = _Outbox()
            loop.event_loop().call_soon(self._flush)
        return self._outboxes[talk.host]

    def _flush(self) -> None:
        for host, process in enumerate(self.processes):
            if process.name not in process.roster.lost and (outbox := self._outboxes.pop(host, None)) is not None:
                outbox.send(process)

    async def _read(self, stream: Stream[dict[int, HostReply]]) -> None:
        """Take the replies of a host's stream, until the host dies."""
        try:
            async for part in stream.results():
                self._take(stream.process, part)
        except RayError as error:
            if stream.process not in self.processes:
                return
            if not await is_replaceable(stream.process, error, activity.doing_now(DOING)):
                raise await explained(stream.process, error, {}, activity.doing_now(DOING)) from None
            self._trouble.set()

    def _take(self, process: Process[Remote], part: Mapping[int, HostReply]) -> None:
        """Pass replies on, and end a host that is worn out. Raises WorkerError if it may not be replaced."""
        self.heard_at = awake_s()
        for key, reply in part.items():
            if (talk := self._open.get(key)) is not None and not talk.reply.done():
                talk.reply.set_result(reply)
        if worn_out := [reply.worn_out for reply in part.values() if reply.worn_out]:
            error = process.roster.report_death(process, f"{process.name} is worn out: {worn_out[-1]}")
            if not isinstance(error, EngineDiedError):
                raise error

    def _create(self, name: str) -> Process[EpisodeHostActor]:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote = ray.remote(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)(EpisodeHostActor)
        return Process(name=name, actor=remote.remote())

    def _begin(self, processes: Sequence[Process[EpisodeHostActor]]) -> None:
        """Start the episode hosts in these processes, and wait for them."""
        calls = [process.ask(EpisodeHostActor.start, self._spec) for process in processes]
        wait_all(calls, timeout_s=self._timeout_s, doing="starting the hosts of environments")

    def _listen(self, process: Process[EpisodeHostActor]) -> None:
        process.roster.expect_answers(process, within_s=SILENCE_S)
        loop.spawn(self._read(process.stream(EpisodeHostActor.serve)))
