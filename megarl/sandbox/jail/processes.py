"""Everything that a task started: how much memory it holds, and its end."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from resource import struct_rusage

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of all processes in this pid namespace but its first."""
    return sum(int(fields[1]) * _PAGE for pid, fields in _tables("statm") if pid != 1)


def end_all(child: int, *, is_isolated: bool) -> tuple[int, struct_rusage]:
    """Kill every process of the task, and wait for each; the wait status of `child`, and what it used."""
    found: tuple[int, struct_rusage] | None = None
    while True:
        _kill_all(is_isolated=is_isolated)
        try:
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            assert found is not None, f"nobody else waits for {child}"
            return found
        if pid == child:
            found = status, usage


def _kill_all(*, is_isolated: bool) -> None:
    # To process 1, -1 is everyone else in its namespace. Elsewhere orphans become children of this process.
    targets = [-1] if is_isolated else [pid for pid, fields in _tables("stat") if int(fields[1]) == os.getpid()]
    for pid in targets:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _tables(name: str) -> Iterator[tuple[int, list[bytes]]]:
    """Numbers that the kernel tells of each process; of `stat`, those after the name."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/{name}", "rb") as file:
                    yield int(entry), file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
