"""The remote processes of a run, and how the driver waits for them."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    """What `wait_all` is waiting for in this process, and since when (seconds since 1970); None: for nothing."""
    return _waiting[-1] if _waiting else None


def wait_all(calls: Sequence[tuple[Process, Any]], *, timeout_s: float, doing: str) -> list[Any]:
    """Results of remote calls in order. The first failure ends the wait: peers would hang in a collective.

    Raises:
        WorkerError: a process of the run died, called or not, or is unreachable, or the calls did not finish in time.
        Exception: whatever megarl or the libraries raised in a process, preferring megarl's own errors.
    """
    _waiting.append((doing, time.time()))
    try:
        return _wait_all(calls, timeout_s, doing)
    finally:
        _waiting.pop()


def _wait_all(calls: Sequence[tuple[Process, Any]], timeout_s: float, doing: str) -> list[Any]:
    names = {ref: process.name for process, ref in calls}
    watch = _Watch(process for process, _ in calls)
    pending, deadline = [ref for _, ref in calls], time.monotonic() + timeout_s
    while pending:
        left_s = deadline - time.monotonic()
        done, pending = ray.wait(pending, timeout=max(0.0, min(WATCH_S, left_s)))
        busy = [names[ref] for ref in pending]
        if not done and left_s <= WATCH_S:
            silent = f"no answer from {', '.join(busy)} within {timeout_s:.0f} s{_doing_of(busy, watch)}"
            raise WorkerError(f"{doing}: {silent}; see RUN/logs")
        for ref in done:
            if (error := _failure(ref)) is not None:
                watch.ask(busy)
                raise _cause(error, ref, [*pending, *watch.asked], names | watch.asked, doing, watch)
        if not done:
            if (lost := watch.lost()) is not None:
                raise WorkerError(f"{doing}: {lost} died; see RUN/logs")
            watch.ask(busy)
    return ray.get([ref for _, ref in calls])


def _failure(ref: Any) -> Exception | None:
    try:
        ray.get(ref, timeout=0)
    except (RayTaskError, ActorDiedError, ActorUnavailableError) as error:
        return error
    except GetTimeoutError:
        return None
    return None


def _doing_of(busy: Sequence[str], watch: "_Watch") -> str:
    """` (trainer rank 1 is stopped; …)` of those that did not answer."""
    found = describe({name: watch.location_of(name) for name in busy[:NUM_DESCRIBED]})
    return f" ({found})" if found else ""


def _cause(
    error: Exception, ref: Any, pending: Sequence[Any], names: Mapping[Any, str], doing: str, watch: _Watch
) -> Exception:
    """The failure to report: a dead process, then megarl's own errors, then whatever came first."""
    done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=CAUSE_WAIT_S) if pending else ([], [])
    failures = [(ref, error), *((r, e) for r in done if (e := _failure(r)) is not None)]
    for failed, failure in failures:
        if isinstance(failure, ActorDiedError | ActorUnavailableError):
            return WorkerError(f"{doing}: {names[failed]} died{_last_words(failure)}; see RUN/logs")
    causes = [getattr(failure, "cause", failure) for _, failure in failures]
    own = [cause for cause in causes if type(cause).__module__.startswith("megarl")]
    if own:
        return own[0]
    silent = [names[r] for r in pending if r not in {failed for failed, _ in failures}]
    others = _doing_of(silent, watch) if silent else ""
    return WorkerError(
        f"{doing}: {names[ref]} failed with {type(causes[0]).__name__}: {causes[0]}{others}; see RUN/logs"
    )


def _last_words(failure: Exception) -> str:
    """What an actor that failed while it was made had to say; nothing for a killed one."""
    text = str(failure)
    return f": {text.strip().splitlines()[-1].strip()}" if "creation task" in text else ""
