"""Run the event loop of a command, which stands still except while something is awaited.

Whatever a command does meanwhile (samples under way, streams that are read) is a task of this loop. Only one wait is
under way at a time, so code between two waits sees nothing change. In a notebook, whose cells run inside a loop of its
own, a thread turns this one.
"""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Coroutine
from typing import TypeVar

from megarl.errors import WorkerError
from megarl.host.clock import AwakeLoop

T = TypeVar("T")

# How long a task that is cancelled may take to end.
ENDING_S = 1.0

# Errors of tasks that no wait has raised yet.
_failures: list[BaseException] = []
_failed = asyncio.Event()


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process."""
    loop = AwakeLoop()
    # A command that ends early leaves tasks behind, of which nobody needs to hear.
    loop.set_exception_handler(lambda loop, context: None)
    return loop


def spawn(work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """Start a task, which goes on during every wait; its error ends the wait under way, or else the next one."""
    task = event_loop().create_task(work)
    task.add_done_callback(_note_failure)
    return task


def wait(work: Awaitable[T]) -> T:
    """Turn the loop until `work` is done, and return its result. Raises its error, or that of a task that fails first.

    If several fail, the death of a process explains the others.
    """
    assert not event_loop().is_running(), "waits are not nested"
    return _turn(_first_of(work))


def _turn(work: Coroutine[object, object, T]) -> T:
    """Turn the loop until `work` is done: in this thread, or in one of its own if a loop runs here already."""
    waiting = event_loop().create_task(work)
    done = asyncio.wait({waiting})
    try:
        if asyncio._get_running_loop() is None:
            event_loop().run_until_complete(done)
        else:
            turning = threading.Thread(target=event_loop().run_until_complete, args=(done,), daemon=True)
            turning.start()
            try:
                turning.join()
            except BaseException:
                event_loop().call_soon_threadsafe(waiting.cancel)
                turning.join()
                raise
        return waiting.result()
    finally:
        # A wait that Ctrl-C ended would otherwise go on in the next one, and take its errors away.
        waiting.cancel()


async def _first_of(work: Awaitable[T]) -> T:
    task, failed = asyncio.ensure_future(work), asyncio.ensure_future(_failed.wait())
    try:
        await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
        if _failures:
            raise next((error for error in _failures if isinstance(error, WorkerError)), _failures[0])
        return task.result()
    finally:
        _failures.clear()
        _failed.clear()
        for each in (task, failed):
            each.cancel()


def _note_failure(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _failures.append(error)
        _failed.set()


def abandon() -> None:
    """End all tasks, whatever they wait for, and forget their errors."""
    tasks = asyncio.all_tasks(event_loop())
    for task in tasks:
        task.cancel()
    if tasks:
        _turn(asyncio.wait(tasks, timeout=ENDING_S))
    _failures.clear()
    _failed.clear()
