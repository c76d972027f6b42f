"""Measure time for time limits: a clock that stands still while this process is stopped.

SIGSTOP, a scheduler that suspends jobs in turn (gang scheduling) and a debugger stop a process, but no other clock.
This process could hear of nobody meanwhile, and those that were stopped along with it have done nothing.
"""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Collection
from typing import Any

# How often the clock looks whether the process runs, and how much of the time between two looks counts.
TICK_S, MOST_S = 0.5, 2.0


class _Clock:
    """A clock, and the thread that looks at it."""

    def __init__(self) -> None:
        now = time.monotonic()
        # The clock's reading, and when it was read; replaced as a whole.
        self._shown = now, now
        threading.Thread(target=self._look, name="clock", daemon=True).start()

    def read(self) -> float:
        shown, at = self._shown
        return shown + min(time.monotonic() - at, MOST_S)

    def _look(self) -> None:
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            self._shown = self.read(), now


_clock = functools.cache(_Clock)
# A fork has no threads of its parent.
os.register_at_fork(after_in_child=_clock.cache_clear)


def awake_s() -> float:
    """Return the seconds of this clock, which differ from those of `time.monotonic` by the time of stops alone."""
    return _clock().read()


class AwakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time limits, and those of the libraries that use it, are of this clock."""

    def time(self) -> float:
        return awake_s()


async def finished(work: "Collection[asyncio.Future[Any]]", timeout_s: float) -> bool:
    """Wait until one of these is done, in whatever event loop; return False if none is after `timeout_s`."""
    deadline = awake_s() + timeout_s
    while (left_s := deadline - awake_s()) > 0:
        if (await asyncio.wait(work, timeout=left_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            return True
    return False
