"""The remote processes of a run, and how the driver waits for them."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from megarl.cluster.location import NOWHERE, Location
from megarl.cluster.stacks import describe
from megarl.errors import WorkerError

# How long to look for the cause once a rank failed: its peers fail too, with less telling errors.
CAUSE_WAIT_S = 2.0
# How often a wait asks the processes that it does not wait for whether they live.
WATCH_S = 0.5
# Of how many silent processes a message says what they do; the stacks of all are in the logs.
NUM_DESCRIBED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A remote process of the run (`RunActor`), how messages name it, and where it runs.

    peers: all processes of the run. Whoever waits for one of them learns of the death of any.
    """

    name: str
    actor: Any
    location: Location = NOWHERE
    peers: tuple["Process", ...] = ()


def locate(actors: Mapping[str, Any], *, timeout_s: float) -> list[Process]:
    """The processes of named actors (`RunActor`), once all have started. With several hosts their names say which."""
    processes = [Process(name=name, actor=actor) for name, actor in actors.items()]
    locations = wait_all([(p, p.actor.locate.remote()) for p in processes], timeout_s=timeout_s, doing="starting")
    several = len({location.host for location in locations}) > 1
    located = tuple(
        replace(p, name=f"{p.name} ({location.hostname})" if several else p.name, location=location)
        for p, location in zip(processes, locations, strict=True)
    )
    return [replace(p, peers=located) for p in located]


class _Watch:
    """Signs of life of the processes that a wait does not wait for: they are asked, and nobody waits for answers."""

    def __init__(self, waited_for: Iterable[Process]) -> None:
        self._peers = {peer.name: peer for process in waited_for for peer in process.peers}
        # Questions without an answer so far, and who was asked.
        self.asked: dict[Any, str] = {}

    def ask(self, busy: Collection[str]) -> None:
        """Ask everyone who is neither busy nor asked already."""
        for name in self._peers.keys() - set(busy) - set(self.asked.values()):
            self.asked[self._peers[name].actor.lost_workers.remote()] = name

    def location_of(self, name: str) -> Location:
        """Where a process of the run is, by its name."""
        return self._peers[name].location if name in self._peers else NOWHERE

    def lost(self) -> str | None:
        """A process that has died since it was asked."""
        for ref in ray.wait(list(self.asked), num_returns=len(self.asked), timeout=0)[0] if self.asked else []:
            name = self.asked.pop(ref)
            try:
                if workers := ray.get(ref):
                    return f"worker {workers[0]} of {name}"
            except (ActorDiedError, ActorUnavailableError):
                return name
        return None


# What this process waits for, and since when.
_waiting: list[tuple[str, float]] = []


def current_wait() -> tuple[str, float] | None:
    """What this process waits for, and since when (seconds since 1970); None: for nothing."""
    return _waiting[-1] if _waiting else None


@contextmanager
def _noted(doing: str) -> Iterator[None]:
    _waiting.append((doing, time.time()))
    try:
        yield
    finally:
        _waiting.pop()


def wait_all(calls: Sequence[tuple[Process, Any]], *, timeout_s: float, doing: str) -> list[Any]:
    """Results of remote calls in order. The first failure ends the wait: peers would hang in a collective.

    Raises:
        WorkerError: a process of the run died, called or not, or is unreachable, or the calls did not finish in time.
        Exception: whatever megarl or the libraries raised in a process, preferring megarl's own errors.
    """
    with _noted(doing):
        wait = _Wait(calls, timeout_s=timeout_s, doing=doing)
        for ref in wait.ready():
            wait.pending.remove(ref)
            wait.require_success(ref, ref)
    return ray.get([ref for _, ref in calls])


def wait_streams(
    calls: Sequence[tuple[Process, Any]], take: Callable[[int, Any], None], *, timeout_s: float, doing: str
) -> None:
    """Wait for the ends of streams of results; `take` gets the position of a call and each of its results, as soon as
    it is there. Raises as `wait_all`, and what `take` raises.
    """
    with _noted(doing):
        positions = {stream: i for i, (_, stream) in enumerate(calls)}
        wait = _Wait(calls, timeout_s=timeout_s, doing=doing)
        for stream in wait.ready():
            try:
                ref = next(stream)
            except StopIteration:
                wait.pending.remove(stream)
                continue
            wait.require_success(ref, stream)
            take(positions[stream], ray.get(ref))


class _Wait:
    """A wait for remote calls, each a reference or a stream of references, until nothing is `pending`."""

    def __init__(self, calls: Sequence[tuple[Process, Any]], *, timeout_s: float, doing: str) -> None:
        self.pending = [call for _, call in calls]
        self._names = {call: process.name for process, call in calls}
        self._watch = _Watch(process for process, _ in calls)
        self._timeout_s, self._doing = timeout_s, doing

    def ready(self) -> Iterator[Any]:
        """What is pending and has something to say, again and again. The caller takes out what is finished."""
        deadline = time.monotonic() + self._timeout_s
        while self.pending:
            left_s = deadline - time.monotonic()
            done, _ = ray.wait(self.pending, timeout=max(0.0, min(WATCH_S, left_s)))
            if not done and left_s <= WATCH_S:
                silent = f"no answer from {', '.join(self._busy())} within {self._timeout_s:.0f} s"
                raise WorkerError(f"{self._doing}: {silent}{self._described(self._busy())}; see RUN/logs")
            yield from done
            if not done:
                if (lost := self._watch.lost()) is not None:
                    raise WorkerError(f"{self._doing}: {lost} died; see RUN/logs")
                self._watch.ask(self._busy())

    def _busy(self) -> list[str]:
        return [self._names[call] for call in self.pending]

    def _described(self, names: Sequence[str]) -> str:
        """` (trainer rank 1 is stopped; …)` of those that did not answer."""
        found = describe({name: self._watch.location_of(name) for name in names[:NUM_DESCRIBED]})
        return f" ({found})" if found else ""

    def require_success(self, ref: Any, call: Any) -> None:
        """Raise the most telling failure if the result `ref` of `call` is one."""
        if (error := _failure(ref)) is None:
            return
        self._watch.ask(self._busy())
        names = self._names | self._watch.asked
        others = [*(other for other in self.pending if other is not call), *self._watch.asked]
        done, silent = ray.wait(others, num_returns=len(others), timeout=CAUSE_WAIT_S) if others else ([], [])
        failures = [(names[call], error), *((names[o], e) for o in done if (e := _failure(o)) is not None)]
        raise _cause(failures, self._doing, lambda: self._described([names[other] for other in silent]))


def _failure(call: Any) -> Exception | None:
    """Why a result that is there, or the next one of a stream, is a failure."""
    try:
        ray.get(next(call) if isinstance(call, ray.ObjectRefGenerator) else call, timeout=0)
    except StopIteration:
        return None
    except (RayTaskError, ActorDiedError, ActorUnavailableError) as error:
        return error
    except GetTimeoutError:
        return None
    return None


def _cause(failures: Sequence[tuple[str, Exception]], doing: str, others: Callable[[], str]) -> Exception:
    """The failure to report, of named processes: a dead process, then megarl's own errors, then whatever came first.

    others: what those do that have not answered.
    """
    for name, failure in failures:
        if isinstance(failure, ActorDiedError | ActorUnavailableError):
            return WorkerError(f"{doing}: {name} died{_last_words(failure)}; see RUN/logs")
    causes = [getattr(failure, "cause", failure) for _, failure in failures]
    own = [cause for cause in causes if type(cause).__module__.startswith("megarl")]
    if own:
        return own[0]
    name, kind = failures[0][0], type(causes[0]).__name__
    return WorkerError(f"{doing}: {name} failed with {kind}: {causes[0]}{others()}; see RUN/logs")


def _last_words(failure: Exception) -> str:
    """What an actor that failed while it was made had to say; nothing for a killed one."""
    text = str(failure)
    return f": {text.strip().splitlines()[-1].strip()}" if "creation task" in text else ""
