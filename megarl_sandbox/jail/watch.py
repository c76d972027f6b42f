"""Watch one child: read its output up to a limit, and decide when it has used too much time or memory."""

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

_CHUNK = 1 << 16
_WATCH_S = 0.05
# Time for a program that closed its pipes to end.
_END_S = 1.0
# How much of the time between two looks counts.
_MOST_GAP_S = 2.0


class OutputStream:
    """The reading end of a pipe that carries a program's output. More than `limit` bytes are an error; the last `keep`
    are kept.
    """

    __slots__ = ("_keep", "_limit", "_total", "data", "fd", "is_over")

    def __init__(self, fd: int, *, limit: int, keep: int | None = None) -> None:
        self.fd = fd
        self.data = bytearray()
        self.is_over = False
        self._limit = limit
        self._keep = limit if keep is None else keep
        self._total = 0

    def read(self) -> bool:
        """Read what has arrived; return False at the end of the stream."""
        chunk = os.read(self.fd, _CHUNK)
        self._total += len(chunk)
        self.is_over = self._total > self._limit
        if not self.is_over:
            self.data += chunk
            del self.data[: -self._keep]
        return bool(chunk)

    def drain(self) -> None:
        """Read what has arrived, without waiting for more."""
        os.set_blocking(self.fd, False)
        with suppress(BlockingIOError):
            while not self.is_over and self.read():
                pass

    def empty(self) -> None:
        """Forget what was read, and count anew."""
        self.data.clear()
        self._total, self.is_over = 0, False


def watch(
    child: int,
    streams: Sequence[OutputStream],
    *,
    wall_s: float,
    excess: Callable[[], str | None],
    is_done: Callable[[], bool] = lambda: False,
) -> str | None:
    """Wait until the child ends or `is_done` (return None), or until it goes over a limit (return which).

    The child is not ended here.
    """
    left, looked = wall_s, time.monotonic()
    end = os.pidfd_open(child)
    poll = select.poll()
    open_streams = {stream.fd: stream for stream in streams}
    for fd in (end, *open_streams):
        poll.register(fd, select.POLLIN)
    next_look = 0.0
    try:
        while left > 0:
            ready = {fd for fd, _ in poll.poll(1000 * min(left, _WATCH_S))}
            now = time.monotonic()
            # In longer gaps this process, and the program with it, was stopped.
            left, looked = left - min(now - looked, _MOST_GAP_S), now
            for fd in ready - {end}:
                if not open_streams[fd].read():
                    poll.unregister(fd)
            if any(stream.is_over for stream in streams):
                return "output"
            if end in ready or is_done():
                return None
            # Programs that write much and in small pieces shall not wait for looks.
            if now >= next_look:
                if over := excess():
                    return over
                next_look = now + _WATCH_S
        return "wall_time"
    finally:
        os.close(end)


def has_ended(child: int) -> bool:
    """Return whether the child ends within a second."""
    end = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        return bool(poll.poll(1000 * _END_S))
    finally:
        os.close(end)
