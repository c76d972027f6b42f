"""Wait for remote calls, while watching whether every process of the run is still alive."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ray.exceptions import ActorDiedError, ActorUnavailableError

from megarl.cluster.ray_session import GONE_S, end_at, lost_ray
from megarl.cluster.remotes import A_co, PendingCall, Process, R, Remote, Roster
from megarl.cluster.stacks import describe
from megarl.errors import EngineDiedError, WorkerError
from megarl.host import activity, loop
from megarl.host.clock import awake_s
from megarl.host.stage import read_stage
from megarl.host.user_code import place_in

# A future of whatever type: no other one stands for all of them, since futures take results, too.
Waited: TypeAlias = "asyncio.Future[Any]"
# How long to look for the cause after a rank has failed: its peers fail too, with less informative errors.
CAUSE_WAIT_S = 2.0
# How often, during a wait, the processes that are not waited for are asked whether they live.
WATCH_S = 0.5
# At most so many silent processes write their stacks to the logs, and are described in a message.
NUM_DESCRIBED = 4


def locate(begun: Sequence[Process[A_co]], *, timeout_s: float, may_move: bool = False) -> list[Process[A_co]]:
    """Wait until processes have started, and return each with its host, process id and devices.

    If the actors run on several hosts, the name of each process ends with its host, unless it may move.
    """
    roster = Roster()
    processes = [replace(process, roster=roster) for process in begun]
    locations = wait_all([p.ask(Remote.locate) for p in processes], timeout_s=timeout_s, doing="starting processes")
    several = not may_move and len({location.host for location in locations}) > 1
    located = [
        replace(p, name=f"{p.name} ({location.hostname})" if several else p.name, location=location)
        for p, location in zip(processes, locations, strict=True)
    ]
    for process in located:
        roster.enter(process)
    return located


def wait_all(calls: Sequence[PendingCall[R]], *, timeout_s: float, doing: str) -> list[R]:
    """Return the results of remote calls in order. Stop at the first failure: other ranks would hang in a collective.

    Raises:
        EngineDiedError: a called process died, and can be replaced.
        WorkerError: any process of the run died, or is unreachable, or the calls did not finish in time. If the dead
            process was not called and can be replaced, the roster records its death and the wait goes on.
        Exception: any error that megarl or a library raised in a called process; megarl's own errors have priority.
    """
    answers = loop.wait(_finished(calls, timeout_s=timeout_s, doing=doing, needs_all=True))
    return [answer.result() for answer in answers]


async def living_results(calls: Sequence[PendingCall[R]], *, timeout_s: float, doing: str) -> list[R | None]:
    """Return results of calls in order, None for a process that died replaceably; else raises as `wait_all`."""
    answers = await _finished(calls, timeout_s=timeout_s, doing=doing, needs_all=False)
    return [None if answer.exception() is not None else answer.result() for answer in answers]


async def _finished(
    calls: Sequence[PendingCall[R]], *, timeout_s: float, doing: str, needs_all: bool
) -> "list[asyncio.Future[R]]":
    answers = [call.answer() for call in calls]
    pending: dict[Waited, Process[Remote]] = dict(zip(answers, (call.process for call in calls), strict=True))
    watchdog = Watchdog(lambda: list(pending.values()), timeout_s=timeout_s, doing=lambda: doing)
    with activity.doing(watchdog.stage):
        while pending:
            done = await watchdog.first_of(pending)
            for answer in [each for each in answers if each in done]:
                process = pending.pop(answer)
                error = answer.exception()
                if error is not None and (needs_all or not await is_replaceable(process, error, doing)):
                    raise await explained(process, error, pending, doing)
    return answers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Death:
    """The fact that a process of the run cannot continue, because it or one of its worker processes died."""

    process: Process[Remote]
    what: str

    def report(self, doing: str) -> WorkerError:
        """Record the death in the run's `Roster`, and return the error that describes it, for the caller to raise."""
        if lost := lost_ray():
            return WorkerError(f"{doing}: {lost}")
        return self.process.roster.report_death(self.process, f"{doing}: {self.what}")


class _Watch:
    """While one wait is under way, watch all other processes of the run for deaths, without blocking."""

    def __init__(self, waited_for: Iterable[Process[Remote]]) -> None:
        self._rosters = list({id(process.roster): process.roster for process in waited_for}.values())

    def is_due(self) -> bool:
        """Return whether `WATCH_S` have passed since any wait last looked, and begin to count anew if so.

        Waits may each be shorter than that: their common clock is the roster's.
        """
        now = awake_s()
        due = [roster for roster in self._rosters if now >= roster.next_look]
        for roster in due:
            roster.next_look = now + WATCH_S
        return bool(due)

    @property
    def asked(self) -> "dict[asyncio.Future[list[int]], Process[Remote]]":
        """Return the pending questions, and the process that each was put to."""
        return {answer: process for roster in self._rosters for answer, (process, _) in roster.asked.items()}

    def ask(self, busy: Collection[Process[Remote]]) -> None:
        """Ask every living process that owes no answer for a sign of life; busy ones only if they are watched."""
        for roster in self._rosters:
            asked = {process for process, _ in roster.asked.values()}
            for name, process in roster.living.items():
                if process not in asked and (process not in busy or roster.watched.get(name) is process):
                    roster.asked[process.ask(Remote.lost_workers).answer()] = (process, awake_s())

    def deaths(self) -> Iterator[_Death]:
        """Yield a `_Death` for each death that the answers received so far reveal, and for each watched process that
        has not answered for too long, after killing it.
        """
        for roster in self._rosters:
            for answer in [each for each in roster.asked if each.done()]:
                if (death := _answered_death(roster.asked.pop(answer)[0], answer)) is not None:
                    yield death
            for answer, (process, since) in list(roster.asked.items()):
                silent_s = awake_s() - since
                if roster.watched.get(process.name) is process and silent_s > roster.silence_s:
                    del roster.asked[answer], roster.watched[process.name]
                    what = f"{process.name} hangs: no sign of life for {silent_s:.0f} s{_described([process])}"
                    end_at(process.location)
                    yield _Death(process=process, what=what)


class Watchdog:
    """Waits with a limit of silence, during which all processes of the run are watched.

    busy: returns the processes that owe something. timeout_s: how long all of them may be silent. heard_at: returns
    when they were last heard of (`awake_s`), if not through `first_of`. doing: says for messages what the wait
    is for.
    """

    def __init__(
        self,
        busy: Callable[[], Sequence[Process[Remote]]],
        *,
        timeout_s: float,
        doing: Callable[[], str],
        heard_at: Callable[[], float] = lambda: 0.0,
        watched: Sequence[Process[Remote]] = (),
    ) -> None:
        self._busy, self._timeout_s, self._doing, self._heard_at = busy, timeout_s, doing, heard_at
        self._watch, self._began = _Watch([*busy(), *watched]), awake_s()

    async def first_of(self, awaited: Iterable[Waited]) -> set[Waited]:
        """Return those that are done, as soon as there are any. Raises WorkerError after too long a silence, or if a
        process dies that cannot be replaced.
        """
        awaited = list(awaited)
        while True:
            done, _ = await asyncio.wait(
                awaited, timeout=max(0.0, min(WATCH_S, self._left_s())), return_when=asyncio.FIRST_COMPLETED
            )
            if not done and self._left_s() <= 0.0:
                if not (busy := self._busy()):
                    raise WorkerError(f"{self._doing()}: no engine has anything left to generate")
                silent = f"no answer from {', '.join(p.name for p in busy)} within {self._timeout_s:.0f} s"
                raise WorkerError(f"{self._doing()}: {silent}{_described(busy)}; see RUN/logs")
            if self._watch.is_due():
                if lost := lost_ray(patience_s=GONE_S):
                    raise WorkerError(f"{self._doing()}: {lost}")
                # Look for deaths of processes that are not waited for, and for those that hang.
                for death in self._watch.deaths():
                    if not isinstance(error := death.report(self._doing()), EngineDiedError):
                        raise error
                self._watch.ask(self._busy())
            if done:
                return done

    def _left_s(self) -> float:
        return max(self._began, self._heard_at()) + self._timeout_s - awake_s()

    def stage(self) -> str:
        """Say what the wait is for, and how far the first process has come that it waits for, if that is known."""
        for process in self._busy():
            if stage := read_stage(process.location.files, process.location.pid):
                return f"{self._doing()}: {process.name}, {stage}"
        return self._doing()


async def is_replaceable(process: Process[Remote], error: BaseException, doing: str) -> bool:
    """Return whether a call failed because its process, which can be replaced, has died; the roster then records it."""
    death = _death(process, error) or await _death_of_worker(process)
    return death is not None and isinstance(death.report(doing), EngineDiedError)


async def explained(
    process: Process[Remote], error: BaseException, pending: Mapping[Waited, Process[Remote]], doing: str
) -> BaseException:
    """Choose the error that best explains a failed call: the death of a process, else one of megarl's own errors, else
    the call's. pending: answers that may fail for the same reason, and the process that owes each.
    """
    watch = _Watch([process, *pending.values()])
    watch.ask(list(pending.values()))
    others: dict[Waited, Process[Remote]] = {**pending, **watch.asked}
    # A death explains itself; others would only fail because of it.
    wait_s = 0.0 if _death(process, error) is not None else CAUSE_WAIT_S
    done, silent = await asyncio.wait(others, timeout=wait_s) if others else (set(), set())
    failures = [(process, error)]
    failures += [(pending[each], e) for each in pending if each in done and (e := each.exception()) is not None]
    deaths = [*(death for failure in failures if (death := _death(*failure))), *watch.deaths()]
    # Only now can a process answer whose call failed because one of its own workers died.
    deaths = deaths or [death for other, _ in failures if (death := await _death_of_worker(other))]
    if lost := lost_ray():
        return WorkerError(f"{doing}: {lost}")
    if reports := [death.report(doing) for death in deaths]:
        return next((report for report in reports if not isinstance(report, EngineDiedError)), reports[0])
    causes = [getattr(failure, "cause", failure) for _, failure in failures]
    # A pickled exception has no traceback, Ray's text of it has.
    place = place_in(str(error))
    if own := [cause for cause in causes if type(cause).__module__.startswith("megarl")]:
        return own[0]
    what = f"{process.name} failed{place and f' at {place}'} with {type(causes[0]).__name__}: {causes[0]}"
    busy = [others[each] for each in others if each in silent]
    return WorkerError(f"{doing}: {what}{_described(busy)}; see RUN/logs")


def _described(processes: Sequence[Process[Remote]]) -> str:
    """Say in parentheses what processes that did not answer are doing: ` (trainer rank 1 is stopped; …)`."""
    found = describe({process.name: process.location for process in processes[:NUM_DESCRIBED]})
    return f" ({found})" if found else ""


def _death(process: Process[Remote], error: BaseException) -> _Death | None:
    """Return a `_Death` if this error of a call to the process means that the process died, else None."""
    if isinstance(error, ActorDiedError | ActorUnavailableError):
        text = str(error)
        # An actor that failed while it was made says why; a killed one has nothing to say.
        last_words = f": {text.strip().splitlines()[-1].strip()}" if "creation task" in text else ""
        return _Death(process=process, what=f"{process.name} died{last_words}")
    return None


def _answered_death(process: Process[Remote], answer: "asyncio.Future[list[int]]") -> _Death | None:
    """Return a `_Death` if the answer to `lost_workers` shows that the process or one of its workers died."""
    if (error := answer.exception()) is not None:
        return _death(process, error)
    workers = answer.result()
    return _Death(process=process, what=f"worker {workers[0]} of {process.name} died") if workers else None


async def _death_of_worker(process: Process[Remote]) -> _Death | None:
    """Ask a process for its lost workers; return a `_Death` if it lost any or died itself, else None."""
    answer = process.ask(Remote.lost_workers).answer()
    done, _ = await asyncio.wait({answer}, timeout=CAUSE_WAIT_S)
    return _answered_death(process, answer) if done else None
