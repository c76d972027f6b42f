"""Give users' functions the standard streams of an ordinary program, and keep the end of what they write."""

import fcntl
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from io import TextIOWrapper

# The text of a call is kept from its end.
MAX_OUTPUT_CHARS = 4_000
# No character of UTF-8 is longer than 4 bytes.
_MAX_BYTES = 4 * MAX_OUTPUT_CHARS
_READ_BYTES = 1 << 16
# C code that writes more than this, without letting other threads of Python run, would wait for ever.
_PIPE_BYTES = 1 << 20
# Users' code may close or replace the standard streams, but hardly a descriptor this high.
_LOWEST_FD = 100
_DUP = fcntl.F_DUPFD_CLOEXEC


class Output:
    """Standard streams for this process: file descriptors 1 and 2 are a pipe, and 0 is empty.

    A thread empties the pipe, so that neither this process nor one that it starts ever waits to write.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(read, False)
        null = os.open(os.devnull, os.O_RDONLY)
        self._read, self._write, self._null = (fcntl.fcntl(fd, _DUP, _LOWEST_FD) for fd in (read, write, null))
        for fd in (read, write, null):
            os.close(fd)
        self._tail, self._lock = bytearray(), threading.Lock()
        self._streams: tuple[TextIOWrapper, ...] = ()
        threading.Thread(target=self._drain, name="output", daemon=True).start()

    @contextmanager
    def taken(self) -> Iterator[list[str]]:
        """Hold the standard streams during a call. The list then has the end of what was written to them, also by
        processes that the call has started.
        """
        self._take()
        self._tail.clear()
        written = list[str]()
        before, saved = (sys.stdin, sys.stdout, sys.stderr), [fcntl.fcntl(fd, _DUP, _LOWEST_FD) for fd in range(3)]
        for fd, source in enumerate((self._null, self._write, self._write)):
            os.dup2(source, fd)
        # The first call opens them, as streams remember whether they can seek; an earlier call may have closed them.
        if not self._streams or any(stream.closed for stream in self._streams):
            reopened = partial(os.fdopen, encoding="utf-8", closefd=False)
            self._streams = reopened(0), reopened(1, "w", 1), reopened(2, "w", 1)
        for stream in self._streams[1:]:
            # In the encoding that an earlier call may have changed; what it cannot hold is written with backslashes.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        sys.stdin, sys.stdout, sys.stderr = self._streams
        try:
            yield written
        finally:
            for stream in self._streams[1:]:
                if not stream.closed:
                    stream.flush()
            for fd, source in enumerate(saved):
                os.dup2(source, fd)
                os.close(source)
            sys.stdin, sys.stdout, sys.stderr = before
            self._take()
            written.append(self._tail.decode("utf-8", "replace")[-MAX_OUTPUT_CHARS:])

    def _drain(self) -> None:
        # Not `select`, which refuses the descriptors above 1023 that a busy process opens.
        written = select.poll()
        written.register(self._read, select.POLLIN)
        while True:
            written.poll()
            self._take()

    def _take(self) -> None:
        """Read what the pipe holds."""
        with self._lock:
            try:
                while part := os.read(self._read, _READ_BYTES):
                    self._tail += part
                    del self._tail[:-_MAX_BYTES]
            except BlockingIOError:
                return


@cache
def output() -> Output:
    """Return the streams that this process holds for its calls; the first call makes them."""
    return Output()
