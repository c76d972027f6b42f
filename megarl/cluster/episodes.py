"""Keep the processes that run environments: deal conversations to them, pass replies on, and replace those that die."""

import asyncio
import gc
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.actors import RunActor
from megarl.cluster.processes import explained, is_replaceable, locate, wait_all
from megarl.cluster.remotes import MOST_RESULTS, Process, Remote, Stream, results
from megarl.cluster.reservation import RayNode, spread_environments
from megarl.environments.calls import cancelled_calls
from megarl.environments.worker import EnvironmentWorker, WorkerSpec, sendable
from megarl.errors import EngineDiedError, WorkerError
from megarl.host import activity, loop
from megarl.host.child_environment import limit_environment
from megarl.host.clock import awake_s
from megarl.host.streams import print_lines
from megarl.rollout.conversations import Conversation, WorkerLostError
from megarl.types.episodes import EpisodeReply, StartRequest, TriesRequest, TurnRequest

# A worker whose event loop does not turn for this long counts as hung: an environment blocks it.
SILENCE_S = 30.0
# How long conversations, and processes, may take to end when the run does.
CLOSE_TIMEOUT_S = 10.0
DOING = "conversing with environments"
# A client of an agent lies in a cycle of few objects, with hundreds of KiB of certificates that the collector does not
# count: by itself it would look for them after hundreds of conversations.
COLLECTED_EVERY = 32


class EnvironmentWorkerActor(RunActor):
    """A Ray actor with an event loop, in which it runs the environments of many conversations."""

    async def start(self, spec: WorkerSpec) -> None:
        """Load the environments and the tokenizer. Raises ConfigError as `EnvironmentWorker` does."""
        # Tools and agents may be functions, which this process calls.
        limit_environment(spec.config.pass_env, key="environment.pass_env")
        self._worker = EnvironmentWorker(spec)
        self._num_ended = 0
        # Then a collection looks at what conversations leave, and not at all that is imported.
        gc.collect()
        gc.freeze()
        self._replies: asyncio.Queue[tuple[int, EpisodeReply]] = asyncio.Queue()
        # The last request of each open conversation, and those that are ending.
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def begin(self, requests: Mapping[int, StartRequest]) -> None:
        """Begin conversations, each by a key of the caller's; `serve` yields the replies."""
        for key, request in requests.items():
            self._requests[key] = asyncio.create_task(self._reply(key, self._worker.start(key, request)))

    async def act(self, requests: Mapping[int, TurnRequest | TriesRequest]) -> None:
        """Take turns of conversations by their keys; `serve` yields the replies."""
        for key, request in requests.items():
            self._requests[key] = asyncio.create_task(self._reply(key, self._worker.act(key, request)))

    async def end(self, keys: Collection[int]) -> None:
        """End conversations, and what their environments do for them."""
        for key in keys:
            ending = asyncio.create_task(self._end(key, self._requests.pop(key, None)))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        self._num_ended += len(keys)
        if self._num_ended >= COLLECTED_EVERY:
            self._num_ended = 0
            gc.collect()

    async def _reply(self, key: int, reply: Awaitable[EpisodeReply]) -> None:
        await self._replies.put((key, sendable(await reply)))

    async def _end(self, key: int, request: asyncio.Task[None] | None) -> None:
        if request is not None:
            request.cancel()
            await asyncio.wait([request])
        await self._worker.close(key)

    async def finish(self) -> None:
        """End all conversations, and wait until nothing is left of them, such as containers and their files."""
        await self.end(tuple(self._requests))
        if self._ending:
            await asyncio.wait(self._ending)
        await cancelled_calls()

    async def serve(self) -> AsyncIterator[dict[int, EpisodeReply]]:
        """Yield the next replies by key as they come."""
        for _ in range(MOST_RESULTS):
            part = dict([await self._replies.get()])
            while not self._replies.empty():
                part |= [self._replies.get_nowait()]
            yield part


@dataclass(frozen=True, slots=True)
class _Outbox:
    """The requests to one worker that are not sent yet, by conversation, and the conversations to end."""

    begin: dict[int, StartRequest] = field(default_factory=dict)
    act: dict[int, TurnRequest | TriesRequest] = field(default_factory=dict)
    end: list[int] = field(default_factory=list)

    def send(self, process: Process[EnvironmentWorkerActor]) -> None:
        """Send them, in one call for each kind."""
        if self.begin:
            process.ask(EnvironmentWorkerActor.begin, self.begin)
        if self.act:
            process.ask(EnvironmentWorkerActor.act, self.act)
        if self.end:
            process.ask(EnvironmentWorkerActor.end, self.end)


class EnvironmentWorkers:
    """The processes (workers) in which a run's environments live, each with an equal share of the conversations.

    Requests leave with all others of the same turn of the loop. Replies come in one stream for each worker, which a
    task reads during every wait. trouble: set when a worker has died; `mend` then replaces it, and tells its
    conversations.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        timeout_s: float,
        trouble: asyncio.Event,
        unused_nodes: Callable[[], Sequence[RayNode]] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Start the workers, and wait for them.

        unused_nodes: lists the nodes that workers may have, for `environment.nodes`; None: all are on the driver's.
        silence_s: after how long a silent worker counts as hung.

        Raises:
            ConfigError: as `EnvironmentWorker` and `spread_environments` do.
        """
        self._spec, self._timeout_s, self._trouble = spec, timeout_s, trouble
        self._unused_nodes, self._silence_s = unused_nodes, silence_s
        self.heard_at, self._num_reported = 0.0, 0
        self._keys = itertools.count()
        self._open: dict[int, Conversation] = {}
        # By worker, the id of its node.
        self._nodes = [ray.get_runtime_context().get_node_id()] * spec.config.hosts
        if unused_nodes is not None:
            self._nodes = spread_environments(spec.config, unused_nodes())
        begun = [self._create(i) for i in range(spec.config.hosts)]
        self.processes = locate(begun, timeout_s=timeout_s, may_move=True)
        # By worker, the requests of this turn of the loop, or those that wait for a new worker.
        self._outboxes: dict[int, _Outbox] = {}
        names = [process.name for process in self.processes]
        roster = self.processes[0].roster
        roster.allow_restarts(names, spec.config.max_host_restarts, by_host=unused_nodes is not None)
        self._begin(self.processes)
        for process in self.processes:
            self._listen(process)
        if unused_nodes is not None:
            counts = Counter(process.location.hostname for process in self.processes)
            where = ", ".join(f"{count} on {host}" for host, count in counts.items())
            print_lines(f"environment workers: {where}")

    def start(self, request: StartRequest) -> Conversation:
        key = next(self._keys)
        conversation = self._open[key] = Conversation(
            key=key, worker=key % len(self.processes), reply=loop.event_loop().create_future()
        )
        self._outbox(conversation).begin[key] = request
        return conversation

    def act(self, conversation: Conversation, request: TurnRequest | TriesRequest) -> None:
        conversation.reply = loop.event_loop().create_future()
        self._outbox(conversation).act[conversation.key] = request

    def end(self, conversation: Conversation) -> None:
        self._outbox(conversation).end.append(conversation.key)
        del self._open[conversation.key]

    def busy(self) -> list[Process[Remote]]:
        """List the workers that owe a reply."""
        workers = {conversation.worker for conversation in self._open.values() if not conversation.reply.done()}
        return [process for i, process in enumerate(self.processes) if i in workers]

    def mend(self) -> None:
        """Replace workers that have died; conversations that they had are lost. Where its node is lost, a worker gets
        another one, and so do all others of that node. Raises WorkerError if there is no node left for them.
        """
        roster, told = self.processes[0].roster, set[int]()
        while roster.lost:
            usable = self._usable()
            gone = [i for i, node in enumerate(self._nodes) if node not in usable]
            for process in [self.processes[i] for i in gone if self.processes[i].name in roster.living]:
                roster.report_death(process, f"{process.name} is lost with its node")
            lost = [i for i, process in enumerate(self.processes) if process.name in roster.lost]
            # Requests for a new worker wait on if that could not start.
            self._lose({*lost} - told, gone)
            told |= {*lost}
            for i in lost:
                if i in gone:
                    gone.remove(i)
                    others = Counter(node for each, node in enumerate(self._nodes) if each not in {i, *gone})
                    self._nodes[i] = min(usable, key=others.__getitem__)
            try:
                # Meanwhile conversations begin again, and their requests wait for the new workers.
                located = locate([self._create(i) for i in lost], timeout_s=self._timeout_s, may_move=True)
                fresh = [replace(process, roster=roster) for process in located]
                self._begin(fresh)
            except WorkerError:
                if set(self._usable()) >= {self._nodes[i] for i in lost}:
                    raise
                continue
            for i, process in zip(lost, fresh, strict=True):
                roster.enter(process)
                self.processes[i] = process
                self._listen(process)
            told -= {*lost}
            self._flush()

    def _usable(self) -> list[str]:
        """List the ids of the nodes that a new worker may have. Raises WorkerError if there are none."""
        if self._unused_nodes is None:
            return self._nodes[:1]
        if not (usable := [node["NodeID"] for node in self._unused_nodes()]):
            raise WorkerError(
                f"{activity.doing_now(DOING)}: all nodes of environment.nodes are lost; --resume once there are others"
            )
        return usable

    def _lose(self, workers: Collection[int], gone: Collection[int]) -> None:
        """Tell the conversations of workers that these have died. gone: those that are lost with their nodes, which
        says nothing against a conversation.
        """
        for worker in workers:
            self._outboxes.pop(worker, None)
        for conversation in [each for each in self._open.values() if each.worker in workers]:
            del self._open[conversation.key]
            conversation.is_lost = True
            if not conversation.reply.done():
                conversation.reply.set_exception(WorkerLostError(conversation.worker in gone))

    def metrics(self) -> dict[str, float]:
        """Return environment/restarts, the workers replaced since the last call."""
        before, self._num_reported = self._num_reported, self.processes[0].roster.num_restarts
        return {"environment/restarts": float(self._num_reported - before)}

    def close(self) -> None:
        """End the conversations and the workers; those that need longer than `CLOSE_TIMEOUT_S` are killed."""
        for conversation in self._open.values():
            conversation.reply.cancel()
        self._open.clear()
        self._outboxes.clear()
        living = [process for process in self.processes if process.name in process.roster.living]
        finishing, began = [process.ask(EnvironmentWorkerActor.finish) for process in living], awake_s()
        for each in finishing:
            with suppress(RayError):
                results([each], timeout_s=max(0.0, CLOSE_TIMEOUT_S - (awake_s() - began)))
        for process in self.processes:
            process.roster.living.pop(process.name, None)
            ray.kill(process.actor)
        self.processes.clear()

    def _outbox(self, conversation: Conversation) -> _Outbox:
        if conversation.worker not in self._outboxes:
            self._outboxes[conversation.worker] = _Outbox()
            loop.event_loop().call_soon(self._flush)
        return self._outboxes[conversation.worker]

    def _flush(self) -> None:
        for worker, process in enumerate(self.processes):
            if process.name not in process.roster.lost and (outbox := self._outboxes.pop(worker, None)) is not None:
                outbox.send(process)

    async def _read(self, stream: Stream[dict[int, EpisodeReply]]) -> None:
        """Take the replies of a worker's stream, until the worker dies."""
        try:
            async for part in stream.results():
                self._take(stream.process, part)
        except RayError as error:
            if stream.process not in self.processes:
                return
            if not await is_replaceable(stream.process, error, activity.doing_now(DOING)):
                raise await explained(stream.process, error, {}, activity.doing_now(DOING)) from None
            self._trouble.set()

    def _take(self, process: Process[Remote], part: Mapping[int, EpisodeReply]) -> None:
        """Pass replies on, and end a worker that is worn out. Raises WorkerError if it may not be replaced."""
        self.heard_at = awake_s()
        for key, reply in part.items():
            if (conversation := self._open.get(key)) is not None and not conversation.reply.done():
                conversation.reply.set_result(reply)
        if worn_out := [reply.worn_out for reply in part.values() if reply.worn_out]:
            error = process.roster.report_death(process, f"{process.name} is worn out: {worn_out[-1]}")
            if not isinstance(error, EngineDiedError):
                raise error

    def _create(self, worker: int) -> Process[EnvironmentWorkerActor]:
        there = NodeAffinitySchedulingStrategy(self._nodes[worker], soft=False)
        remote = ray.remote(num_cpus=0, max_concurrency=100_000, scheduling_strategy=there)(EnvironmentWorkerActor)
        return Process(name=f"environment worker {worker}", actor=remote.remote())

    def _begin(self, processes: Sequence[Process[EnvironmentWorkerActor]]) -> None:
        """Start the environment workers in these processes, and wait for them."""
        calls = [process.ask(EnvironmentWorkerActor.start, self._spec) for process in processes]
        wait_all(calls, timeout_s=self._timeout_s, doing="starting the environment workers")

    def _listen(self, process: Process[EnvironmentWorkerActor]) -> None:
        process.roster.expect_answers(process, within_s=self._silence_s)
        loop.spawn(self._read(process.stream(EnvironmentWorkerActor.serve)))
