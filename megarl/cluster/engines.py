"""Distribute generation requests over the engines of a cluster, and collect the completions."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.cluster.episodes import EpisodeHosts
from megarl.cluster.processes import take_ready, wait_all, wait_living, wait_streams
from megarl.cluster.roster import Process
from megarl.rollout.engine import Completion, EngineWork, GenerationRequest
from megarl.rollout.source import Doing, generating
from megarl.rollout.vllm_source import OnCompletion
from megarl.types import FloatArray


@dataclass(frozen=True, slots=True)
class _Open:
    """An unfinished request: which engine works on it, and who is told of its completion, with which position."""

    request: GenerationRequest
    engine: int
    tell: OnCompletion
    position: int


def _nobody(position: int, completion: Completion) -> None:
    """Ignore the completion of a request that had finished before."""


def _has_succeeded(call: Any) -> bool:
    """Return whether a call has ended without an error, without waiting for it."""
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except RayError:
        return False
    return True


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

    Engines take requests at any time, and send completions in one stream each. Every request has its own seed, so the
    samples do not depend on the number of engines. hosts: run the environments that samples have conversations with;
    waits and polls take their replies, too.
    """

    def __init__(self, processes: Sequence[Process], *, timeout_s: float) -> None:
        self.processes, self._timeout_s = list(processes), timeout_s
        self.hosts: EpisodeHosts | None = None
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}
        # Whether requests of a dead engine are repeated with all that were submitted along with them.
        self.repeats_hands = False
        # By engine, its unfinished requests; with `repeats_hands` all since it last had none.
        self._hands: dict[int, dict[int, _Open]] = {}
        # By engine, its process, and its stream of completions or the failed result that ended the stream.
        self._streams: dict[int, tuple[Process, Any]] = {}
        # Calls that hand requests over, until they have succeeded.
        self._adding: list[tuple[Process, Any]] = []

    def submit(self, requests: Sequence[GenerationRequest], tell: OnCompletion) -> None:
        """Start generating, and return at once; `tell` gets each completion with the position of its request.

        Engines with fewer unfinished requests come first. If none lives, the requests wait for a new one as those of a
        dead engine do.
        """
        load = dict.fromkeys(self.living() or range(len(self.processes)), 0)
        for each in self._open.values():
            if each.engine in load:
                load[each.engine] += 1
        engines = deal_requests(requests, sorted(load, key=lambda i: (load[i], i)))
        opened = {next(self._ids): _Open(r, engines[i], tell, i) for i, r in enumerate(requests)}
        if self.living():
            self._start(opened)
            return
        self._open |= opened
        for key, each in opened.items():
            self._hands.setdefault(each.engine, {})[key] = each

    def _start(self, opened: Mapping[int, _Open]) -> None:
        self._open |= opened
        for engine in sorted({each.engine for each in opened.values()}):
            mine = {key: each for key, each in opened.items() if each.engine == engine}
            self._hands.setdefault(engine, {}).update(mine)
            process = self.processes[engine]
            if self._streams.get(engine, (None, None))[0] is not process:
                self._streams[engine] = (process, process.actor.serve.options(num_returns="streaming").remote())
            added = process.actor.call.remote("add", {key: each.request for key, each in mine.items()})
            self._adding.append((process, added))

    def living(self) -> list[int]:
        """List the engines that are not known to be dead, by index."""
        return [i for i, process in enumerate(self.processes) if process.name not in process.roster.lost]

    def wait(self, until: Callable[[], bool], *, timeout_s: float, doing: Doing = generating) -> None:
        """Pass completions on as they arrive, until `until()`. Returns early if an engine dies that can be restarted.

        timeout_s: limits the time in which no completion arrives.
        """
        living = self.living()
        # The calls of dead engines have failed, and their requests are submitted again.
        self._adding = [(p, call) for p, call in self._adding if p in [self.processes[i] for i in living]]
        while not until() and self.living() == living:
            streams = {i: self._streams[i] for i in living if i in self._streams}
            engines = [*streams.values(), *self._adding]
            hosts = [] if self.hosts is None else self.hosts.calls()
            if not engines and not hosts:
                return
            # An engine that has had no request yet gets its stream with the first one, and its answers in a new wait.
            self._wait_once(engines, hosts, partial(self._has_more, living, len(streams), until), timeout_s, doing)

    def _has_more(self, living: Sequence[int], num_streams: int, until: Callable[[], bool]) -> bool:
        return until() or sum(i in self._streams for i in living) > num_streams

    def _wait_once(
        self,
        engines: Sequence[tuple[Process, Any]],
        hosts: Sequence[tuple[Process, Any]],
        until: Callable[[], bool],
        timeout_s: float,
        doing: Doing,
    ) -> None:
        def take(place: int, part: Mapping[int, Any]) -> None:
            if place < len(engines):
                self._take(part)
            elif self.hosts is not None:
                self.hosts.take(part)

        wait_streams([*engines, *hosts], take, until=until, timeout_s=timeout_s, doing=doing)
        # One that failed meanwhile is explained by the next wait.
        self._adding = [each for each in self._adding if not _has_succeeded(each[1])]
        if self.hosts is not None:
            self.hosts.mend()

    def poll(self) -> None:
        """Pass completions and replies on that have arrived, without waiting."""
        if self.hosts is not None:
            self.hosts.poll()
        streams = {i: self._streams[i][1] for i in self.living() if i in self._streams}
        engines = [i for i, stream in streams.items() if isinstance(stream, ray.ObjectRefGenerator)]
        for place, failed in take_ready([streams[i] for i in engines], self._take).items():
            self._streams[engines[place]] = (self._streams[engines[place]][0], failed)

    def _take(self, part: Mapping[int, Completion]) -> None:
        for key, completion in part.items():
            # Otherwise the request was finished before its engine died, or was given up.
            if (each := self._open.pop(key, None)) is not None:
                if self.are_idle([each.engine]):
                    self._hands.pop(each.engine, None)
                elif not self.repeats_hands:
                    self._hands[each.engine].pop(key)
                each.tell(each.position, replace(completion, engine=each.engine))
        if self.hosts is not None:
            self.hosts.flush()

    def are_idle(self, engines: Sequence[int]) -> bool:
        """Return whether none of these engines has unfinished requests."""
        return not any(each.engine in engines for each in self._open.values())

    def await_replies(self) -> bool:
        """Return whether environments have yet to reply to samples."""
        return self.hosts is not None and not self.hosts.are_idle()

    def orphans(self) -> list[int]:
        """List the dead engines that had unfinished requests."""
        living = self.living()
        return sorted({each.engine for each in self._open.values()} - {*living})

    def start_again(self, engine: int, *, exactly: bool) -> None:
        """Submit the unfinished requests of an engine that died again.

        exactly: to the engine in its place, with all that were submitted along with them, so that results are bitwise
        equal; nobody is told of those again that had finished. Otherwise: to all living engines.
        """
        hand = self._hands.pop(engine)
        if exactly:
            told = {key: replace(each, tell=_nobody) for key, each in hand.items() if key not in self._open}
            self._start(hand | told)
            return
        left = {key: self._open.pop(key) for key in hand if key in self._open}
        engines = deal_requests([each.request for each in left.values()], self.living())
        self._start({key: replace(each, engine=to) for (key, each), to in zip(left.items(), engines, strict=True)})

    def unfinished(self) -> list[tuple[OnCompletion, int, Completion]]:
        """Return the tokens so far of all unfinished requests that have any, with who would be told and the position.

        The requests go on.
        """
        found = self._ask("unfinished", doing="asking for unfinished samples")
        self.poll()
        parts = {key: each for parts in found.values() for key, each in parts.items() if key in self._open}
        return [(self._open[key].tell, self._open[key].position, completion) for key, completion in parts.items()]

    def abort(self) -> None:
        """Forget all unfinished requests."""
        if self._open:
            self._move("abort", doing="aborting unfinished requests")
            self._open.clear()
            self._hands.clear()

    def work(self) -> dict[int, EngineWork]:
        """Return what each living engine did since the last call; that of an engine which has just died is lost."""
        return self._ask("work", doing="asking engines for their work")

    def _ask(self, method: str, *, doing: str) -> dict[int, Any]:
        """Return the answers of the engines that live, by index."""
        calls = {i: (self.processes[i], self.processes[i].actor.call.remote(method)) for i in self.living()}
        wait_living(list(calls.values()), timeout_s=self._timeout_s, doing=doing)
        return {i: ray.get(calls[i][1]) for i in self.living()}

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]], *, engine: int = 0) -> list[FloatArray]:
        """Return the log-probs that one engine gives the tokens of given sequences, at temperature 1."""
        process = self.processes[engine]
        call = process.actor.call.remote("prompt_logprobs", [list(s) for s in sequences])
        return wait_all([(process, call)], timeout_s=self._timeout_s, doing="scoring with the engine")[0]

    def sleep(self) -> None:
        """Make the engines free the memory of weights and KV caches (vLLM's sleep), on platforms that support sleep."""
        self._move("sleep", doing="putting engines to sleep")

    def wake(self, parts: Sequence[str]) -> None:
        """Make the engines allocate memory again: for `weights`, which the next weight sync fills, or `kv_cache`."""
        self._move("wake", list(parts), doing="waking engines")

    def _move(self, method: str, *args: Any, doing: str) -> None:
        # An engine that died has nothing to move.
        calls = [(p, p.actor.call.remote(method, *args)) for p in self.processes]
        wait_living(calls, timeout_s=self._timeout_s, doing=doing)
