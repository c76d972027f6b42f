"""Call users' code such that the process that it shares survives errors, blocking calls, and calls that never end."""

import asyncio
import contextvars
import ctypes
import errno
import functools
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from megarl.host.clock import awake_s, finished
from megarl.host.masking import masked_text

T = TypeVar("T")
# Calls that may run at once in a process.
MOST_CALLS, MOST_AGENTS = 128, 100_000
# The number of late calls in a row with which whoever was called is given up.
MOST_LATE = 3
# How long a call that nobody waits for may go on before its thread is asked to end.
GRACE_S = 30.0


class LateError(Exception):
    """A call took longer than its limit."""


@dataclass(slots=True)
class LateRun:
    """A run of late calls without an answer between them. Calls that were under way together count as one."""

    _count: int = 0
    _late_at: float = 0.0

    def add(self, called_at: float) -> bool:
        """Count a late call by the time at which it was made; return whether whoever was called is to be given up."""
        if called_at >= self._late_at:
            self._count, self._late_at = self._count + 1, awake_s()
        return self._count >= MOST_LATE

    def end(self) -> None:
        self._count = 0


class EscapedError(Exception):
    """Code of an environment raised SystemExit or the like, which would have ended the event loop that it shares."""


def message_of(error: BaseException) -> str:
    """Return the text of an error, which may fail to say what it is, or quote a URL with a key."""
    try:
        return masked_text(str(error))
    except BaseException as failed:
        return f"(its text cannot be written: {type(failed).__name__})"


def describe(error: BaseException) -> str:
    """Say what was raised, as `ValueError: no such city`, or `StopIteration` if there is no more to it."""
    text = message_of(error)
    return text if isinstance(error, EscapedError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error, then those that caused it, one after the other."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def is_exhaustion(error: BaseException) -> bool:
    """Return whether an error says that this process has no files or memory left."""
    return any(
        isinstance(each, MemoryError) or getattr(each, "errno", None) in (errno.EMFILE, errno.ENOMEM)
        for each in causes_of(error)
    )


async def attempt(work: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Call `work` and await it for that many seconds; return what it returns, or raise what it raises.

    Work that does not let itself be cancelled goes on, and nobody waits for it. Raises LateError if it is late, and
    EscapedError if it raises what is no Exception or cancels itself.
    """
    late = LateError(f"took longer than {timeout_s:g} s")
    if timeout_s <= 0:
        raise late
    task = asyncio.ensure_future(contained(work()))
    try:
        if not await finished([task], timeout_s):
            raise late
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            _LEFT.add(task)
            task.add_done_callback(_forget)


async def contained(work: Awaitable[T]) -> T:
    """Await `work`, and raise Exceptions alone, unless the task that awaits it is cancelled."""
    try:
        return await work
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, Exception) or (task is not None and task.cancelling()):
            raise
        raise EscapedError(describe(error)) from error


# The loop itself keeps no reference to a task.
_LEFT: set["asyncio.Task[Any]"] = set()


async def cancelled_calls() -> None:
    """Wait until the calls that `attempt` has cancelled have ended."""
    if _LEFT:
        await asyncio.wait(_LEFT)


def _forget(task: "asyncio.Task[Any]") -> None:
    _LEFT.discard(task)
    if not task.cancelled():
        # Nobody asks any more how it ended.
        task.exception()


class _Call(Future[Any]):
    """A call in a thread. One that runs cannot be cancelled: `cancel` then notes that nobody waits for it any more."""

    def __init__(self, threads: "CallThreads", function: Callable[[], object], name: str) -> None:
        super().__init__()
        self._threads, self.function, self.name = threads, function, name
        self.thread = threading.Thread(target=threads.work, args=(self,), daemon=True, name=f"call of {name}")
        self.late_at = 0.0

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if not is_cancelled:
            self._threads.give_up(self)
        return is_cancelled


class CallThreads(ThreadPoolExecutor):
    """Threads for calls that block: each call has one of its own; `most` run at once, others wait.

    A thread cannot be ended. One that nobody waits for any more leaves its place to the next call, is asked to end
    `GRACE_S` later, which it hears when it next runs Python, and never keeps the process from ending.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._most, self._guard = most, threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        # Threads leave this set without the lock, as being asked to end may hit them wherever they are.
        self._late: set[_Call] = set()

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> "Future[T]":
        # asyncio.to_thread hands a function over as the argument of a partial Context.run.
        own: object = function
        if isinstance(function, functools.partial):
            own = function.args[0] if function.args else function.func
        work = functools.partial(function, *arguments, **named)
        call = _Call(self, work, getattr(own, "__name__", type(own).__name__))
        with self._guard:
            self._waiting.append(call)
        self._start_waiting()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: event loops come and go, and none of them waits for the threads."""

    def late(self) -> list[str]:
        """Return the functions' names of the calls that go on although nobody waits for them."""
        return [call.name for call in list(self._late) if call.thread.is_alive()]

    def give_up(self, call: _Call) -> None:
        """Let another call have this one's place."""
        with self._guard:
            if call not in self._running:
                return
            call.late_at = awake_s()
            self._late.add(call)
            self._running.discard(call)
        self._start_waiting()

    def work(self, call: _Call) -> None:
        """Make a call, in its thread."""
        try:
            if call.set_running_or_notify_cancel():
                call.set_result(call.function())
        except BaseException as error:
            # A future takes no StopIteration, and no loop survives a SystemExit.
            is_error = isinstance(error, Exception) and not isinstance(error, StopIteration)
            call.set_exception(error if is_error else EscapedError(describe(error)))
        finally:
            if call in self._late:
                self._late.discard(call)
            else:
                with self._guard:
                    self._running.discard(call)
                    self._late.discard(call)
                self._start_waiting()

    def _start_waiting(self) -> None:
        for call in list(self._late):
            if not call.thread.is_alive():
                self._late.discard(call)
            elif awake_s() - call.late_at > GRACE_S:
                # Ask it to end.
                ident = ctypes.c_ulong(call.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        with self._guard:
            while self._waiting and len(self._running) < self._most:
                call = self._waiting.popleft()
                if call.cancelled():
                    continue
                self._running.add(call)
                try:
                    call.thread.start()
                except RuntimeError as error:
                    self._running.discard(call)
                    call.set_exception(RuntimeError(f"no thread for {call.name}: {error}; raise `ulimit -u`"))


# Those that all environments of a process share. Agents block theirs for a whole conversation.
THREADS, AGENT_THREADS = CallThreads(MOST_CALLS), CallThreads(MOST_AGENTS)


def late_calls() -> list[str]:
    """Return the functions' names of the calls of this process's environments that go on although nobody waits."""
    return THREADS.late() + AGENT_THREADS.late()


async def in_thread(function: Callable[..., T], *arguments: Any, timeout_s: float | None = None) -> T:
    """Call a function in a thread of `THREADS`. Raises LateError `timeout_s` seconds after the call has begun."""
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()

    @functools.wraps(function)
    def work() -> T:
        loop.call_soon_threadsafe(begun.set)
        return function(*arguments)

    call = loop.run_in_executor(THREADS, functools.partial(contextvars.copy_context().run, work))
    beginning: asyncio.Future[Any] = asyncio.ensure_future(begun.wait())
    try:
        if timeout_s is not None:
            await asyncio.wait([beginning, call], return_when=asyncio.FIRST_COMPLETED)
            if not await finished([call], timeout_s):
                raise LateError(f"took longer than {timeout_s:g} s")
        return await call
    finally:
        beginning.cancel()
        call.cancel()
