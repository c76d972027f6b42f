"""Call methods of remote actors by the methods themselves, so that arguments and results keep their types, and keep
track of a run's processes: where they run, and which of them may die without ending the run.
"""

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import ray
from ray.exceptions import GetTimeoutError

from megarl.errors import EngineDiedError, WorkerError
from megarl.host import loop
from megarl.host.clock import MOST_S, awake_s
from megarl.record.progress import write_line

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
H = TypeVar("H")
H_co = TypeVar("H_co", covariant=True)
F = TypeVar("F", bound=Callable[..., object])
# A method that yields without end ends its call after so many results, and is called again: as long as a call lasts,
# Ray keeps the name of each of them at both ends.
MOST_RESULTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The host and devices of a process. `host`: Ray's id of the host; `files`: the directory on this host in which
    the process leaves its Python stacks and its stage; `device_ids`: ids of the devices that Ray gave the process;
    `further_hosts`: the hosts of an engine's other nodes.
    """

    host: str
    address: str
    device_ids: tuple[str, ...]
    hostname: str = ""
    pid: int = 0
    files: str = ""
    further_hosts: tuple[str, ...] = ()

    def host_of(self, worker: int, num_workers: int) -> str:
        """Return the host of one of an engine's workers, which are spread evenly over its nodes."""
        hosts = (self.host, *self.further_hosts)
        return hosts[worker * len(hosts) // num_workers]


NOWHERE = Location(host="", address="", device_ids=())


class Remote(Protocol):
    """The methods of every actor of a run; see `RunActor`."""

    def locate(self) -> Location: ...

    def lost_workers(self) -> list[int]: ...

    def close(self) -> None: ...


class Hosting(Remote, Protocol[H_co]):
    """An actor that hosts an object, whose methods it calls."""

    def call(self, method: Callable[Concatenate[H_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...


A_co = TypeVar("A_co", bound=Remote, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall(Generic[R_co]):
    """A pending call to a process; Ray has its result under `ref`."""

    process: "Process[Remote]"
    ref: ray.ObjectRef

    def answer(self) -> "asyncio.Future[R_co]":
        """Return a future of the result, in the loop of this process."""
        answer = asyncio.wrap_future(self.ref.future(), loop=loop.event_loop())
        # After the first failure, nobody asks for those of others.
        answer.add_done_callback(lambda each: each.cancelled() or each.exception())
        return answer


@dataclass(slots=True, kw_only=True, eq=False)
class Stream(Generic[R_co]):
    """The results that a method of a process yields, in one pending call after the other.

    begin: calls the method, again after each `MOST_RESULTS`.
    """

    process: "Process[Remote]"
    begin: Callable[[], ray.ObjectRefGenerator]
    ref: ray.ObjectRefGenerator
    _is_arriving: bool = False

    async def results(self) -> AsyncIterator[R_co]:
        """Yield results as they come; for one reader. Raises Ray's error if the call fails."""
        while True:
            count = 0
            async for ref in self.ref:
                self._is_arriving = True
                result: R_co = await ref
                self._is_arriving = False
                yield result
                count += 1
            if count < MOST_RESULTS:
                return
            self.ref = self.begin()

    def has_more(self) -> bool:
        """Return whether there is a result, or the end, that the reader has not been given yet."""
        return self._is_arriving or bool(ray.wait([self.ref], timeout=0)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(Generic[A_co]):
    """A remote process of the run: the handle of its actor, its name in messages, and where it runs.

    roster: all processes of the run, so that a wait for this process notices the death of any other.
    """

    name: str
    actor: ray.actor.ActorHandle
    location: Location = NOWHERE
    roster: "Roster" = field(default_factory=lambda: Roster(), compare=False, repr=False)

    @overload
    def ask(
        self, method: Callable[Concatenate[A_co, P], Coroutine[object, object, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]: ...

    @overload
    def ask(
        self, method: Callable[Concatenate[A_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]: ...

    def ask(
        self, method: Callable[Concatenate[A_co, P], object], /, *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[object]:
        """Begin a call of a method of the actor itself."""
        return PendingCall(process=self, ref=getattr(self.actor, method.__name__).remote(*args, **kwargs))

    def call(
        self: "Process[Hosting[H]]", method: Callable[Concatenate[H, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]:
        """Begin a call of a method of the object that the actor hosts."""
        return PendingCall(process=self, ref=self.actor.call.remote(method, *args, **kwargs))

    def stream(
        self,
        method: Callable[Concatenate[A_co, P], Iterator[R] | AsyncIterator[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Stream[R]:
        """Begin a call of a method of the actor itself that is a generator, which ends after `MOST_RESULTS`."""
        streaming = getattr(self.actor, method.__name__).options(num_returns="streaming")
        begin = functools.partial(streaming.remote, *args, **kwargs)
        return Stream(process=self, begin=begin, ref=begin())


class Roster:
    """The list of a run's processes, by name. Some can be replaced when they die; the death of any other ends the run.

    living: processes that are not known to be dead. lost: dead processes that are to be replaced. num_restarts: the
    number of replacements so far, including those still to come for `lost`. watched: processes that answer questions
    while they work, and count as hung if they do not for `silence_s` seconds. asked: questions that have no answer yet,
    with the process and the time (`awake_s`) of the question. next_look: when a wait should look for deaths
    again.
    """

    def __init__(self) -> None:
        self.living: dict[str, Process[Remote]] = {}
        self._replaceable: frozenset[str] = frozenset()
        self._max_restarts, self._by_host = 0, False
        self.lost: dict[str, Process[Remote]] = {}
        self.num_restarts = 0
        self.watched: dict[str, Process[Remote]] = {}
        self.silence_s = math.inf
        self.asked: dict[asyncio.Future[list[int]], tuple[Process[Remote], float]] = {}
        self.next_look = 0.0

    def enter(self, process: Process[Remote]) -> None:
        """Add a process, replacing the lost one of the same name if there is one."""
        self.living[process.name] = process
        self.lost.pop(process.name, None)

    def expect_answers(self, process: Process[Remote], *, within_s: float) -> None:
        """From now on, take this process for hung if it does not answer a question within that many seconds."""
        self.watched[process.name], self.silence_s = process, within_s

    def allow_restarts(self, names: Collection[str], max_restarts: int, *, by_host: bool = False) -> None:
        """From now on, survive up to `max_restarts` deaths among the processes `names`, all together.

        by_host: those of a host that are lost at the same time count once.
        """
        self._replaceable, self._max_restarts, self.num_restarts = frozenset(names), max_restarts, 0
        self._by_host = by_host

    def report_death(self, process: Process[Remote], event: str) -> WorkerError:
        """Record a death and print a warning; return the error, an `EngineDiedError` if the process can be replaced.

        event: text that says what the run was doing and which process died.
        """
        message = f"{event}; see RUN/logs"
        if process.name in self._replaceable and self.living.get(process.name) != process:
            return EngineDiedError(message)  # a process that was already reported dead
        hosts = {lost.location.host for lost in self.lost.values()} if self._by_host else set()
        if process.location.host not in hosts:
            if process.name not in self._replaceable or self.num_restarts == self._max_restarts:
                return WorkerError(message)
            self.num_restarts += 1
        self.lost[process.name] = self.living.pop(process.name)
        # An engine survives the death of its workers: kill it, so that calls to it fail.
        ray.kill(process.actor)
        where = f"on {process.location.hostname or 'its host'}"
        write_line(f"warning: {event} {where}; restart {self.num_restarts} of {self._max_restarts}")
        return EngineDiedError(message)


def results(calls: Sequence[PendingCall[R]], *, timeout_s: float | None = None) -> list[R]:
    """Return the results of calls in order. Raises Ray's error for the first that failed; `wait_all` explains it."""
    found: list[R] = got([call.ref for call in calls], timeout_s)
    return found


def got(refs: object, timeout_s: float | None) -> Any:
    """Return as `ray.get`, whose own limit counts the time for which this process is stopped."""
    began = awake_s()
    while True:
        try:
            return ray.get(refs, timeout=None if timeout_s is None else min(timeout_s, MOST_S))
        except GetTimeoutError:
            if timeout_s is not None and awake_s() - began >= timeout_s:
                raise


def in_group(name: str) -> Callable[[F], F]:
    """Put a method into a concurrency group of its actor, whose calls run beside those of other groups."""
    mark: Callable[[F], F] = ray.method(concurrency_group=name)
    return mark
