"""Wait for remote calls, while watching whether every process of the run is still alive."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from megarl.cluster.ending import end_at
from megarl.cluster.roster import Process, Roster
from megarl.cluster.stacks import describe
from megarl.errors import EngineDiedError, WorkerError
from megarl.host.stage import read_stage
from megarl.record import activity

# How long to look for the cause after a rank has failed: its peers fail too, with less informative errors.
CAUSE_WAIT_S = 2.0
# How often, during a wait, the processes that are not waited for are asked whether they live.
WATCH_S = 0.5
# How often, during a wait, work in the background is served: samples that finish go to their judges without delay.
SERVE_S = 0.05
# How many silent processes a message describes at most; the stacks of all are in the logs.
NUM_DESCRIBED = 4


def locate(actors: Mapping[str, Any], *, timeout_s: float) -> list[Process]:
    """Wait until Ray actors have started, and return each as a `Process` with its host, process id and devices.

    If the actors run on several hosts, the name of each process ends with its host.
    """
    roster = Roster()
    processes = [Process(name=name, actor=actor, roster=roster) for name, actor in actors.items()]
    locations = wait_all(
        [(p, p.actor.locate.remote()) for p in processes], timeout_s=timeout_s, doing="starting processes"
    )
    several = len({location.host for location in locations}) > 1
    located = [
        replace(p, name=f"{p.name} ({location.hostname})" if several else p.name, location=location)
        for p, location in zip(processes, locations, strict=True)
    ]
    for process in located:
        roster.enter(process)
    return located


@dataclass(frozen=True, slots=True, kw_only=True)
class _Death:
    """The fact that a process of the run cannot continue, because it or one of its worker processes died."""

    process: Process
    what: str

    def report(self, doing: str) -> WorkerError:
        """Record the death in the run's `Roster`, and return the error that describes it, for the caller to raise."""
        return self.process.roster.report_death(self.process, f"{doing}: {self.what}")


class _Watch:
    """While one wait is under way, watch all other processes of the run for deaths, without blocking."""

    def __init__(self, waited_for: Iterable[Process]) -> None:
        self._rosters = list({id(process.roster): process.roster for process in waited_for}.values())

    def is_due(self) -> bool:
        """Return whether `WATCH_S` have passed since any wait last looked, and begin to count anew if so.

        Waits may each be shorter than that: their common clock is the roster's.
        """
        now = time.monotonic()
        due = [roster for roster in self._rosters if now >= roster.next_look]
        for roster in due:
            roster.next_look = now + WATCH_S
        return bool(due)

    @property
    def asked(self) -> dict[Any, Process]:
        """Return the pending questions, and the process that each was put to."""
        return {ref: process for roster in self._rosters for ref, (process, _) in roster.asked.items()}

    def ask(self, busy: Collection[Process]) -> None:
        """Ask every living process for a sign of life that has answered the last question; not if it is busy, unless it
        answers nevertheless.
        """
        for roster in self._rosters:
            asked = {process for process, _ in roster.asked.values()}
            for name, process in roster.living.items():
                if process not in asked and (process not in busy or roster.watched.get(name) is process):
                    roster.asked[process.actor.lost_workers.remote()] = (process, time.monotonic())

    def deaths(self) -> Iterator[_Death]:
        """Yield a `_Death` for each death that the answers received so far reveal, and for each watched process that
        has not answered for too long, after killing it.
        """
        for roster in self._rosters:
            asked = list(roster.asked)
            for ref in ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else []:
                if (death := _answered_death(roster.asked.pop(ref)[0], ref)) is not None:
                    yield death
            for ref, (process, since) in list(roster.asked.items()):
                silent_s = time.monotonic() - since
                if roster.watched.get(process.name) is process and silent_s > roster.silence_s:
                    del roster.asked[ref], roster.watched[process.name]
                    what = f"{process.name} hangs: no sign of life for {silent_s:.0f} s{_described([process])}"
                    end_at(process.location)
                    yield _Death(process=process, what=what)


# Work that goes on while this process waits for others; it must not wait itself.
_background: list[Callable[[], None]] = []


@contextmanager
def in_background(serve: Callable[[], None]) -> Iterator[None]:
    """Within this context, call `serve` about every `SERVE_S` seconds of each wait; it must not wait itself."""
    _background.append(serve)
    try:
        yield
    finally:
        _background.remove(serve)


def wait_all(calls: Sequence[tuple[Process, Any]], *, timeout_s: float, doing: str) -> list[Any]:
    """Return the results of remote calls in order. Stop at the first failure: other ranks would hang in a collective.

    Raises:
        EngineDiedError: a called process died, and can be replaced.
        WorkerError: any process of the run died, or is unreachable, or the calls did not finish in time. If the dead
            process was not called and can be replaced, the roster records its death and the wait goes on.
        Exception: any error that megarl or a library raised in a called process; megarl's own errors have priority.
    """
    wait_living(calls, timeout_s=timeout_s, doing=doing, needs_all=True)
    return ray.get([ref for _, ref in calls])


def wait_living(calls: Sequence[tuple[Process, Any]], *, timeout_s: float, doing: str, needs_all: bool = False) -> None:
    """Wait until each remote call has ended, or its process has died and can be replaced. Raises the errors of
    `wait_all`.

    needs_all: raise EngineDiedError also for a process that can be replaced, instead of only recording its death.
    """
    wait = _Wait(calls, timeout_s=timeout_s, doing=lambda: doing, needs_all=needs_all)
    with activity.doing(wait.stage):
        for ref in wait.ready():
            if ref is not None:
                wait.succeeded(ref, ref)
                wait.end(ref)


def wait_streams(
    calls: Sequence[tuple[Process, Any]],
    take: Callable[[int, Any], None],
    *,
    until: Callable[[], bool],
    timeout_s: float,
    doing: Callable[[], str],
) -> None:
    """Pass each result of streaming remote calls to `take` on arrival, with the index of its call, until `until()`.

    Among the calls may be single ones, whose results nobody takes, and failed results of streams (see `take_ready`).
    Returns early when a called process has died that can be replaced. timeout_s: limits the time without any result.
    doing: says for messages what the wait is for. Raises the errors of `wait_living` and of `take`.
    """
    positions = {call: i for i, (_, call) in enumerate(calls)}
    wait = _Wait(calls, timeout_s=timeout_s, doing=doing, needs_all=False)
    with activity.doing(doing):
        ready = wait.ready()
        while not until():
            try:
                call = next(ready)
            except StopIteration:
                return
            if call is None:
                continue
            is_stream = isinstance(call, ray.ObjectRefGenerator)
            ref = next(call, None) if is_stream else call
            if ref is not None and not wait.succeeded(ref, call):
                return
            if ref is None or not is_stream:
                wait.end(call)
                continue
            wait.restart_clock()
            take(positions[call], ray.get(ref))


def take_ready(streams: Sequence[Any], take: Callable[[Any], None]) -> dict[int, Any]:
    """Pass the results that streams of remote calls have ready to `take`, without waiting.

    Returns the failed result of each stream that failed, by its index; `wait_streams` explains it if it is a call.
    """
    failed: dict[int, Any] = {}
    left = {stream: i for i, stream in enumerate(streams)}
    while left and (ready := ray.wait(list(left), num_returns=len(left), timeout=0)[0]):
        for stream in ready:
            ref = next(stream, None)
            if ref is not None and _failure(ref) is None:
                take(ray.get(ref))
                continue
            if ref is not None:
                failed[left[stream]] = ref
            del left[stream]
    return failed


class _Wait:
    """A wait for several remote calls; each call is an object reference or a stream of references.

    doing: says for messages what the wait is for. needs_all: whether the wait fails if a called process dies that can
    be replaced.
    """

    def __init__(
        self,
        calls: Sequence[tuple[Process, Any]],
        *,
        timeout_s: float,
        doing: Callable[[], str],
        needs_all: bool = True,
    ) -> None:
        self._pending = {call: process for process, call in calls}
        self._watch = _Watch(process for process, _ in calls)
        self._timeout_s, self._doing, self._needs_all = timeout_s, doing, needs_all
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin to count `timeout_s` anew."""
        self._deadline = time.monotonic() + self._timeout_s

    def ready(self) -> Iterator[Any]:
        """Yield each pending call that has a result, until `end` was called for every call; None after a pause."""
        while self._pending:
            left_s, pause_s = self._deadline - time.monotonic(), SERVE_S if _background else WATCH_S
            done, _ = ray.wait(list(self._pending), timeout=max(0.0, min(pause_s, left_s)))
            if not done and left_s <= pause_s:
                busy = list(self._pending.values())
                silent = f"no answer from {', '.join(p.name for p in busy)} within {self._timeout_s:.0f} s"
                raise WorkerError(f"{self._doing()}: {silent}{_described(busy)}; see RUN/logs")
            yield from done
            if self._watch.is_due():
                # Look for deaths of processes that are not waited for, and for those that hang.
                for death in self._watch.deaths():
                    if not isinstance(error := death.report(self._doing()), EngineDiedError):
                        raise error
                self._watch.ask(self._pending.values())
            if not done:
                for serve in _background:
                    serve()
                # The caller may wait for what the background has just done.
                yield None

    def stage(self) -> str:
        """Say what the wait is for, and how far the first process has come that it waits for, if that is known."""
        for process in list(self._pending.values()):
            if stage := read_stage(process.location.files, process.location.pid):
                return f"{self._doing()}: {process.name}, {stage}"
        return self._doing()

    def end(self, call: Any) -> None:
        """Stop waiting for a call."""
        self._pending.pop(call, None)

    def succeeded(self, ref: Any, call: Any) -> bool:
        """Return whether `ref`, a result of `call`, succeeded; False if its process died but can be replaced.

        Raises the error that best explains any other failure.
        """
        if (error := _failure(ref)) is None:
            return True
        process = self._pending.pop(call)
        if not self._needs_all:
            death = _death(process, error) or _death_of_worker(process)
            if death is not None and isinstance(death.report(self._doing()), EngineDiedError):
                return False
        raise self._cause(process, error)

    def _cause(self, process: Process, error: Exception) -> Exception:
        """Choose the error that best explains a failure: the death of a process, else one of megarl's errors, else the
        first.
        """
        self._watch.ask(self._pending.values())
        others = self._pending | self._watch.asked
        # A death explains itself; others would only fail because of it.
        wait_s = 0.0 if _death(process, error) is not None else CAUSE_WAIT_S
        done, silent = ray.wait(list(others), num_returns=len(others), timeout=wait_s) if others else ([], [])
        failures = [(process, error)]
        failures += [(self._pending[call], e) for call in done if call in self._pending and (e := _failure(call))]
        deaths = [*(death for failure in failures if (death := _death(*failure))), *self._watch.deaths()]
        # Only now can a process answer whose call failed because one of its own workers died.
        deaths = deaths or [death for other, _ in failures if (death := _death_of_worker(other))]
        if reports := [death.report(self._doing()) for death in deaths]:
            return next((report for report in reports if not isinstance(report, EngineDiedError)), reports[0])
        causes = [getattr(failure, "cause", failure) for _, failure in failures]
        if own := [cause for cause in causes if type(cause).__module__.startswith("megarl")]:
            return own[0]
        what = f"{process.name} failed with {type(causes[0]).__name__}: {causes[0]}"
        return WorkerError(f"{self._doing()}: {what}{_described([others[call] for call in silent])}; see RUN/logs")


def _described(processes: Sequence[Process]) -> str:
    """Say in parentheses what processes that did not answer are doing: ` (trainer rank 1 is stopped; …)`."""
    found = describe({process.name: process.location for process in processes[:NUM_DESCRIBED]})
    return f" ({found})" if found else ""


def _failure(call: Any) -> Exception | None:
    """Return the error in a call's result, or in the next result of a stream; None if there is no error."""
    try:
        ray.get(next(call) if isinstance(call, ray.ObjectRefGenerator) else call, timeout=0)
    except StopIteration:
        return None
    except (RayTaskError, ActorDiedError, ActorUnavailableError) as error:
        return error
    except GetTimeoutError:
        return None
    return None


def _death(process: Process, error: Exception) -> _Death | None:
    """Return a `_Death` if this error of a call to the process means that the process died, else None."""
    if isinstance(error, ActorDiedError | ActorUnavailableError):
        text = str(error)
        # An actor that failed while it was made says why; a killed one has nothing to say.
        last_words = f": {text.strip().splitlines()[-1].strip()}" if "creation task" in text else ""
        return _Death(process=process, what=f"{process.name} died{last_words}")
    return None


def _answered_death(process: Process, ref: Any) -> _Death | None:
    """Return a `_Death` if `ref`, the answer to `lost_workers`, shows that the process or one of its workers died."""
    if (error := _failure(ref)) is not None:
        return _death(process, error)
    workers = ray.get(ref)
    return _Death(process=process, what=f"worker {workers[0]} of {process.name} died") if workers else None


def _death_of_worker(process: Process) -> _Death | None:
    """Ask a process for its lost workers; return a `_Death` if it lost any or died itself, else None."""
    ref = process.actor.lost_workers.remote()
    return _answered_death(process, ref) if ray.wait([ref], timeout=CAUSE_WAIT_S)[0] else None
