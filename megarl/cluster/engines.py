"""Distribute generation requests over the engines of a cluster, and collect the completions."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ray.exceptions import RayError

from megarl.cluster.actors import EngineActor
from megarl.cluster.episodes import EpisodeHosts
from megarl.cluster.processes import Vigil, explained, is_replaceable, living_results, wait_all
from megarl.cluster.remotes import PendingCall, Process, R, Remote, Stream
from megarl.host import loop
from megarl.record import activity
from megarl.rollout.engine import Completion, GenerationRequest, VllmEngine
from megarl.rollout.source import Doing, generating
from megarl.rollout.stepping import EngineWork
from megarl.types import FloatArray


@dataclass(frozen=True, slots=True)
class _Open:
    """An unfinished request, the engine that works on it, and the future that gets its completion."""

    request: GenerationRequest
    engine: int
    completion: "asyncio.Future[Completion]"


def deal_requests(requests: Sequence[GenerationRequest], order: Sequence[int]) -> list[int]:
    """Assign requests to engines, which take turns in the given order; return the engine of each request.

    Requests with the same prompt go to one engine, which then uses its prefix cache; distinct prompts are assigned in
    turn. If there are fewer prompts than engines, single requests are assigned in turn. A request that names its engine
    goes there if it is among them.
    """
    prompts = {request.token_ids: i for i, request in enumerate({r.token_ids: r for r in requests}.values())}
    by_prompt = len(prompts) >= len(order)
    return [
        r.engine
        if r.engine is not None and r.engine in order
        else order[(prompts[r.token_ids] if by_prompt else i) % len(order)]
        for i, r in enumerate(requests)
    ]


class EngineGroup:
    """The engines of a run, called together; each holds a full copy of the policy.

    Engines take requests at any time, and send completions in one stream each, which a task reads during every wait.
    Every request has its own seed, so the samples do not depend on the number of engines. hosts: run the environments
    that samples have conversations with. trouble: set when an engine or host has died and is to be replaced.
    """

    def __init__(self, processes: Sequence[Process[EngineActor]], *, timeout_s: float) -> None:
        self.processes, self._timeout_s = list(processes), timeout_s
        self.hosts: EpisodeHosts | None = None
        self.trouble = asyncio.Event()
        # Whether requests of a dead engine are repeated with all that were submitted along with them.
        self.repeats_hands = False
        self._ids = itertools.count()
        # Requests that no engine has been given.
        self._outbox: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._open: dict[int, _Open] = {}
        # By engine, its unfinished requests; with `repeats_hands` all since it last had none.
        self._hands: dict[int, dict[int, _Open]] = {}
        # By engine, the stream of its completions.
        self._streams: dict[int, Stream[dict[int, Completion]]] = {}
        self._heard_at = 0.0

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        """Queue a request, and return the future of its completion.

        It leaves with all others of this turn of the loop, in one call for each engine. Engines with fewer unfinished
        requests come first. If none lives, the requests wait until `flush` finds one.
        """
        if not self._outbox:
            loop.event_loop().call_soon(self.flush)
        completion: asyncio.Future[Completion] = loop.event_loop().create_future()
        self._outbox.append((request, completion))
        return completion

    def flush(self) -> None:
        """Give the requests that wait to the living engines, if there are any."""
        living = self.living()
        if not living:
            self.trouble.set()
            return
        posted, self._outbox = self._outbox, []
        load = dict.fromkeys(living, 0)
        for each in self._open.values():
            if each.engine in load:
                load[each.engine] += 1
        engines = deal_requests([request for request, _ in posted], sorted(load, key=lambda i: (load[i], i)))
        opened = {
            next(self._ids): _Open(request, engine, completion)
            for (request, completion), engine in zip(posted, engines, strict=True)
        }
        self._start(opened)

    def _start(self, opened: Mapping[int, _Open]) -> None:
        self._open |= opened
        for engine in sorted({each.engine for each in opened.values()}):
            mine = {key: each for key, each in opened.items() if each.engine == engine}
            self._hands.setdefault(engine, {}).update(mine)
            process = self.processes[engine]
            if engine not in self._streams or self._streams[engine].process is not process:
                self._streams[engine] = process.stream(EngineActor.serve)
                loop.spawn(self._read(engine, self._streams[engine]))
            requests = {key: each.request for key, each in mine.items()}
            loop.spawn(self._hand_over(engine, process.call(VllmEngine.add, requests)))

    async def _hand_over(self, engine: int, call: PendingCall[None]) -> None:
        try:
            await call.answer()
        except RayError as error:
            await self._failed(engine, call.process, error)

    async def _read(self, engine: int, stream: Stream[dict[int, Completion]]) -> None:
        """Take the completions of an engine's stream, until the engine dies."""
        try:
            async for part in stream.results():
                self._take(part)
        except RayError as error:
            await self._failed(engine, stream.process, error)

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
        if self.living() and not self.repeats_hands and engine in self._hands:
            self.start_again(engine, exactly=False)
        self.trouble.set()

    def _take(self, part: Mapping[int, Completion]) -> None:
        self._heard_at = time.monotonic()
        for key, completion in part.items():
            # Otherwise the request was finished before its engine died, or was given up.
            if (each := self._open.pop(key, None)) is None:
                continue
            if self.are_idle([each.engine]):
                self._hands.pop(each.engine, None)
                if self.orphans():
                    self.trouble.set()
            elif not self.repeats_hands:
                self._hands[each.engine].pop(key)
            if not each.completion.done():
                each.completion.set_result(replace(completion, engine=each.engine))

    def living(self) -> list[int]:
        """List the engines that are not known to be dead, by index."""
        return [i for i, process in enumerate(self.processes) if process.name not in process.roster.lost]

    async def attend(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing = generating) -> None:
        """Wait until `work` is done, or there is `trouble`. timeout_s: how long all engines and hosts may be silent."""
        watched = [*self.processes, *(self.hosts.processes if self.hosts else ())]
        vigil = Vigil(
            self._busy,
            timeout_s=timeout_s,
            doing=doing,
            heard_at=lambda: max(self._heard_at, self.hosts.heard_at if self.hosts is not None else 0.0),
            watched=watched,
        )
        trouble = asyncio.ensure_future(self.trouble.wait())
        try:
            with activity.doing(doing):
                await vigil.first_of({work, trouble})
        finally:
            trouble.cancel()

    def _busy(self) -> list[Process[Remote]]:
        """List the engines and hosts that owe something."""
        engines = {each.engine for each in self._open.values()}
        hosts = self.hosts.busy() if self.hosts is not None else []
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
        hand = self._hands.pop(engine)
        if exactly:
            self._start(hand)
            return
        left = {key: self._open.pop(key) for key in hand if key in self._open}
        engines = deal_requests([each.request for each in left.values()], self.living())
        self._start({key: replace(each, engine=to) for (key, each), to in zip(left.items(), engines, strict=True)})

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        """Return the tokens so far of all unfinished requests that have any, by their futures; the requests go on."""
        return loop.wait(self._parts())

    async def _parts(self) -> "dict[asyncio.Future[Completion], Completion]":
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
        """Forget all unfinished requests, and cancel who waits for them."""
        if self._open:
            self._move([p.call(VllmEngine.abort) for p in self.processes], doing="aborting unfinished requests")
        for completion in [*(each.completion for each in self._open.values()), *(each for _, each in self._outbox)]:
            completion.cancel()
        for container in (self._open, self._hands, self._outbox):
            container.clear()

    def work(self) -> dict[int, EngineWork]:
        """Return what each living engine did since the last call; that of an engine which has just died is lost."""
        return loop.wait(self._answers(VllmEngine.work, doing="asking engines for their work"))

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

    def sleep(self) -> None:
        """Make the engines free the memory of weights and KV caches (vLLM's sleep), on platforms that support sleep."""
        self._move([p.call(VllmEngine.sleep) for p in self.processes], doing="putting engines to sleep")

    def wake(self, parts: Sequence[str]) -> None:
        """Make the engines allocate memory again: for `weights`, which the next weight sync fills, or `kv_cache`."""
        self._move([p.call(VllmEngine.wake, list(parts)) for p in self.processes], doing="waking engines")

    def _move(self, calls: Sequence[PendingCall[None]], *, doing: str) -> None:
        # An engine that died has nothing to move.
        loop.wait(living_results(calls, timeout_s=self._timeout_s, doing=doing))
