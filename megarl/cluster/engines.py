"""Distribute generation requests over the engines of a cluster, and collect the completions."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ray.exceptions import RayError

from megarl.cluster.actors import EngineActor
from megarl.cluster.episodes import EnvironmentWorkers
from megarl.cluster.processes import Watchdog, explained, is_replaceable, living_results, wait_all
from megarl.cluster.remotes import PendingCall, Process, R, Remote, Stream
from megarl.host import activity, loop
from megarl.host.clock import awake_s
from megarl.rollout.engine import Completion, EngineReply, GenerationRequest, VllmEngine
from megarl.rollout.routing import InTurns, RequestMove, Router
from megarl.rollout.source import Doing, generating
from megarl.rollout.stepping import EngineWork
from megarl.types import FloatArray


@dataclass(frozen=True, slots=True)
class _Open:
    """An unfinished request, the engine that works on it, and the future that gets its completion."""

    request: GenerationRequest
    engine: int
    completion: "asyncio.Future[Completion]"


class EngineGroup:
    """The engines of a run, called together; each holds a full copy of the policy.

    Engines take requests at any time, and send completions in one stream each, which a task reads during every wait.
    Every request has its own seed, so the samples do not depend on the number of engines, unless `router` moves them.
    hosts: run the environments that samples have conversations with. trouble: set when an engine or host has died and
    is to be replaced. num_moved: how many samples have gone on at another engine.
    """

    def __init__(
        self, processes: Sequence[Process[EngineActor]], *, timeout_s: float, router: Router | None = None
    ) -> None:
        """Take the processes of engines. router: decides which engine gets which request; None: `InTurns`."""
        self.processes, self._timeout_s, self.router = list(processes), timeout_s, router or InTurns()
        self.num_moved = 0
        self.environment_workers: EnvironmentWorkers | None = None
        self.trouble = asyncio.Event()
        # Whether requests of a dead engine are repeated with all that were submitted along with them.
        self.repeats_batches = False
        self._ids = itertools.count()
        # Requests that no engine has been given, and whether they are about to be.
        self._outbox: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._is_flushing = self._is_paused = False
        self._moves: set[asyncio.Task[None]] = set()
        self._open: dict[int, _Open] = {}
        # By engine, its unfinished requests; with `repeats_batches` all since it last had none.
        self._batches: dict[int, dict[int, _Open]] = {}
        # By engine, the stream of its replies.
        self._streams: dict[int, Stream[EngineReply]] = {}
        self._heard_at = 0.0

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        """Queue a request, and return the future of its completion.

        Requests of this turn of the loop are dealt together, and leave in one call for each engine. Those that the
        router keeps back leave when an engine has replied. If no engine lives, they wait until `flush` finds one.

        If another engine takes the sample over, the completion has the tokens so far, and ends with `ABORT`.
        """
        self._flush_soon()
        completion: asyncio.Future[Completion] = loop.event_loop().create_future()
        self._outbox.append((request, completion))
        return completion

    def _flush_soon(self) -> None:
        """Call `flush` at the end of this turn of the loop."""
        if not self._is_flushing:
            self._is_flushing = True
            loop.event_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Give living engines those of the requests that wait that the router places now."""
        self._is_flushing, living = False, self.living()
        if self._outbox and not living:
            self.trouble.set()
        if not self._outbox or not living or self._is_paused:
            return
        placed = self.router.place([request for request, _ in self._outbox], living)
        if not placed:
            return
        posted, self._outbox = self._outbox, [each for i, each in enumerate(self._outbox) if i not in placed]
        self._start({next(self._ids): _Open(posted[i][0], placed[i], posted[i][1]) for i in sorted(placed)})

    def _start(self, opened: Mapping[int, _Open]) -> None:
        self._open |= opened
        for engine in sorted({each.engine for each in opened.values()}):
            mine = {key: each for key, each in opened.items() if each.engine == engine}
            self._batches.setdefault(engine, {}).update(mine)
            requests = {key: each.request for key, each in mine.items()}
            self.router.sent(engine, requests)
            process = self.processes[engine]
            if engine not in self._streams or self._streams[engine].process is not process:
                self._streams[engine] = process.stream(EngineActor.serve)
                loop.spawn(self._read(engine, self._streams[engine]))
            loop.spawn(self._hand_over(engine, process.call(VllmEngine.add, requests)))

    async def _hand_over(self, engine: int, call: PendingCall[None]) -> None:
        try:
            await call.answer()
        except RayError as error:
            await self._failed(engine, call.process, error)

    async def _read(self, engine: int, stream: Stream[EngineReply]) -> None:
        """Take the replies of an engine's stream, until the engine dies."""
        try:
            async for reply in stream.results():
                self._take(reply.completions)
                self.router.heard(engine, reply.load)
                if self._outbox:
                    self._flush_soon()
                elif not self._is_paused:
                    for move in self.router.moves(self.living()):
                        task = loop.spawn(self._carry_out(move))
                        self._moves.add(task)
                        task.add_done_callback(self._moves.discard)
        except RayError as error:
            await self._failed(engine, stream.process, error)

    async def _carry_out(self, move: RequestMove) -> None:
        """Take requests from an engine, and send them to the other one; samples that go on there end here first."""
        process = self.processes[move.source]
        try:
            taken = await process.call(VllmEngine.take_out, move.keys).answer()
        except RayError as error:
            await self._failed(move.source, process, error)
            return
        again: dict[int, _Open] = {}
        for key, completion in taken.items():
            # Otherwise the request was given up.
            if (each := self._open.pop(key, None)) is None:
                continue
            self._leave(each.engine, key)
            if completion is None or not move.goes_on:
                again[key] = replace(each, engine=move.target)
            elif not each.completion.done():
                self.num_moved += move.source != move.target
                each.completion.set_result(replace(completion, engine=move.target))
        if move.target in self.living() and not self._is_paused:
            self._start(again)
        else:
            self._put_back(again)

    def pause(self) -> None:
        """End all requests that engines work on; further ones, with which their samples go on, wait for `resume`."""
        self._is_paused = True
        if self._open:
            loop.wait(self._take_all())

    async def _take_all(self) -> None:
        while self._moves:
            await asyncio.wait(set(self._moves))
        batches = {engine: tuple(self._batches.get(engine, ())) for engine in self.living()}
        moves = [RequestMove(source=i, target=i, keys=keys, goes_on=True) for i, keys in batches.items() if keys]
        await asyncio.gather(*map(self._carry_out, moves))
        # The samples ask for more.
        for _ in range(2):
            await asyncio.sleep(0)

    def resume(self) -> None:
        """Let engines have requests again."""
        self._is_paused = False
        self.flush()

    async def _failed(self, engine: int, process: Process[Remote], error: Exception) -> None:
        """Let living engines take over the requests of one that died, or its successor; raise any other failure."""
        if self.processes[engine] is not process:
            return
        doing = activity.doing_now(generating())
        if not await is_replaceable(process, error, doing):
            raise await explained(process, error, {}, doing)
        if self.processes[engine] is not process:
            return
        self._streams.pop(engine, None)
        if self.living() and not self.repeats_batches and engine in self._batches:
            self.start_again(engine, exactly=False)
        self.trouble.set()

    def _take(self, part: Mapping[int, Completion]) -> None:
        if part:
            self._heard_at = awake_s()
        for key, completion in part.items():
            # Otherwise the request was finished before its engine died, or was given up.
            if (each := self._open.pop(key, None)) is None:
                continue
            self._leave(each.engine, key, num_tokens=len(completion.token_ids))
            if not each.completion.done():
                each.completion.set_result(replace(completion, engine=each.engine))

    def _leave(self, engine: int, key: int, *, num_tokens: int | None = None) -> None:
        """Note that an engine has a request no more. num_tokens: its length if it has finished."""
        self.router.ended(key, num_tokens)
        if self.are_idle([engine]):
            self._batches.pop(engine, None)
            if self.orphans():
                self.trouble.set()
        elif not self.repeats_batches:
            self._batches[engine].pop(key)

    def _put_back(self, opened: Mapping[int, _Open]) -> None:
        """Let requests be placed again, before those that no engine had yet."""
        self._outbox[:0] = [(each.request, each.completion) for each in opened.values()]
        self.flush()

    def living(self) -> list[int]:
        """List the engines that are not known to be dead, by index."""
        return [i for i, process in enumerate(self.processes) if process.name not in process.roster.lost]

    async def attend(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing = generating) -> None:
        """Wait until `work` is done, or there is `trouble`. timeout_s: how long all engines and environment workers may
        be silent.
        """
        watched = [*self.processes, *(self.environment_workers.processes if self.environment_workers else ())]
        watchdog = Watchdog(
            self._busy,
            timeout_s=timeout_s,
            doing=doing,
            heard_at=lambda: max(
                self._heard_at, self.environment_workers.heard_at if self.environment_workers is not None else 0.0
            ),
            watched=watched,
        )
        trouble = asyncio.ensure_future(self.trouble.wait())
        try:
            with activity.doing(doing):
                await watchdog.first_of({work, trouble})
        finally:
            trouble.cancel()

    def _busy(self) -> list[Process[Remote]]:
        """List the engines and environment workers that owe something."""
        engines = {each.engine for each in self._open.values()}
        hosts = self.environment_workers.busy() if self.environment_workers is not None else []
        return [*(self.processes[i] for i in self.living() if i in engines), *hosts]

    def are_idle(self, engines: Sequence[int]) -> bool:
        """Return whether none of these engines has unfinished requests."""
        return not any(each.engine in engines for each in self._open.values())

    def are_missed(self) -> bool:
        """Return whether requests wait since no engine lives."""
        return bool(self._outbox) and not self.living()

    def orphans(self) -> list[int]:
        """List the dead engines that had unfinished requests."""
        living = self.living()
        return sorted({each.engine for each in self._open.values()} - {*living})

    def start_again(self, engine: int, *, exactly: bool) -> None:
        """Submit the unfinished requests of an engine that died again.

        exactly: to the engine in its place, with all that were submitted along with them, so that results are bitwise
        equal; those that had finished are dropped when they come again. Otherwise: to all living engines.
        """
        batch = self._batches.pop(engine)
        if exactly:
            self._start(batch)
            return
        left = {key: self._open.pop(key) for key in batch if key in self._open}
        for key in left:
            self.router.ended(key)
        self._put_back(left)

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        """Return the tokens so far of all unfinished requests that have any, by their futures; the requests go on."""
        return loop.wait(self._parts())

    async def _parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        while self._moves:
            # A sample that it has taken from an engine is nowhere else.
            await asyncio.wait(set(self._moves))
        found = await self._answers(VllmEngine.unfinished, doing="asking for unfinished samples")
        # Samples that had finished before are on their way.
        while any(stream.has_more() for stream in self._streams.values()):
            await asyncio.sleep(0)
        # And who waited for it goes on.
        for _ in range(2):
            await asyncio.sleep(0)
        parts = {key: each for parts in found.values() for key, each in parts.items() if key in self._open}
        return {self._open[key].completion: completion for key, completion in parts.items()}

    def abort(self) -> None:
        """Forget all unfinished requests, cancel who waits for them, and take requests again."""
        self._is_paused = False
        if self._open:
            self._move([p.call(VllmEngine.abort) for p in self.processes], doing="aborting unfinished requests")
        for completion in [*(each.completion for each in self._open.values()), *(each for _, each in self._outbox)]:
            completion.cancel()
        for key in self._open:
            self.router.ended(key)
        for container in (self._open, self._batches, self._outbox):
            container.clear()

    def work(self) -> dict[int, EngineWork]:
        """Return what each living engine did since the last call; that of an engine which has just died is lost."""
        return self.ask_each(VllmEngine.work, doing="asking engines for their work")

    def ask_each(self, method: Callable[[VllmEngine], R], *, doing: str) -> dict[int, R]:
        """Return what each living engine answers, by its index; the answer of one that has just died is lost."""
        return loop.wait(self._answers(method, doing=doing))

    async def _answers(self, method: Callable[[VllmEngine], R], *, doing: str) -> dict[int, R]:
        """Return the answers of the engines that live, by index."""
        asked = self.living()
        calls = [self.processes[i].call(method) for i in asked]
        answers = await living_results(calls, timeout_s=self._timeout_s, doing=doing)
        return {i: answer for i, answer in zip(asked, answers, strict=True) if answer is not None}

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]], *, engine: int = 0) -> list[FloatArray]:
        """Return the log-probs that one engine gives the tokens of given sequences, at temperature 1."""
        call = self.processes[engine].call(VllmEngine.prompt_logprobs, [list(s) for s in sequences])
        return wait_all([call], timeout_s=self._timeout_s, doing="computing log-probs with the engine")[0]

    def sleep(self) -> bool:
        """Make the engines free the memory of weights and KV caches (vLLM's sleep), on platforms that support sleep.

        Return whether they have dropped weights, which a sync has to send again.
        """
        calls = [p.call(VllmEngine.sleep) for p in self.processes]
        return any(loop.wait(living_results(calls, timeout_s=self._timeout_s, doing="putting engines to sleep")))

    def wake(self, parts: Sequence[str]) -> None:
        """Make the engines allocate memory again: for `weights`, which the next weight sync fills, or `kv_cache`."""
        self._move([p.call(VllmEngine.wake, list(parts)) for p in self.processes], doing="waking engines")

    def _move(self, calls: Sequence[PendingCall[None]], *, doing: str) -> None:
        # An engine that died has nothing to move.
        loop.wait(living_results(calls, timeout_s=self._timeout_s, doing=doing))
