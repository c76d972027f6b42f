"""Call methods of remote actors by the methods themselves, so that arguments and results keep their types."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import ray

from megarl.cluster.roster import NOWHERE, Location, Roster
from megarl.host import loop

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
H = TypeVar("H")
H_co = TypeVar("H_co", covariant=True)
F = TypeVar("F", bound=Callable[..., object])


class Remote(Protocol):
    """What every actor of a run answers; see `RunActor`."""

    def locate(self) -> Location: ...

    def lost_workers(self) -> list[int]: ...

    def close(self) -> None: ...


class Hosting(Remote, Protocol[H_co]):
    """An actor that hosts an object, whose methods it calls."""

    def call(self, method: Callable[Concatenate[H_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...


A_co = TypeVar("A_co", bound=Remote, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[R_co]):
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
    """A pending call to a process that yields many results."""

    process: "Process[Remote]"
    ref: ray.ObjectRefGenerator
    _is_arriving: bool = False

    async def results(self) -> AsyncIterator[R_co]:
        """Yield results as they come; for one reader. Raises Ray's error if the call fails."""
        async for ref in self.ref:
            self._is_arriving = True
            result: R_co = await ref
            self._is_arriving = False
            yield result

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
    roster: Roster = field(default_factory=Roster, compare=False, repr=False)

    @overload
    def ask(
        self,
        method: Callable[Concatenate[A_co, P], Coroutine[object, object, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Call[R]: ...

    @overload
    def ask(self, method: Callable[Concatenate[A_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...

    def ask(self, method: Callable[Concatenate[A_co, P], object], /, *args: P.args, **kwargs: P.kwargs) -> Call[object]:
        """Begin a call of a method of the actor itself."""
        return Call(process=self, ref=getattr(self.actor, method.__name__).remote(*args, **kwargs))

    def call(
        self: "Process[Hosting[H]]", method: Callable[Concatenate[H, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Call[R]:
        """Begin a call of a method of the object that the actor hosts."""
        return Call(process=self, ref=self.actor.call.remote(method, *args, **kwargs))

    def stream(
        self,
        method: Callable[Concatenate[A_co, P], Iterator[R] | AsyncIterator[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Stream[R]:
        """Begin a call of a method of the actor itself that is a generator."""
        streaming = getattr(self.actor, method.__name__).options(num_returns="streaming")
        return Stream(process=self, ref=streaming.remote(*args, **kwargs))


def results(calls: Sequence[Call[R]], *, timeout_s: float | None = None) -> list[R]:
    """Return the results of calls in order. Raises Ray's error for the first that failed; `wait_all` explains it."""
    found: list[R] = ray.get([call.ref for call in calls], timeout=timeout_s)
    return found


def in_group(name: str) -> Callable[[F], F]:
    """Put a method into a concurrency group of its actor, whose calls run beside those of other groups."""
    mark: Callable[[F], F] = ray.method(concurrency_group=name)
    return mark
