"""Measure the memory of a task's processes, and end them."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from resource import struct_rusage

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Family:
    """All processes that a task starts: in a pid namespace, all except process 1. `table`: a descriptor of /proc."""

    def __init__(self, table: int, *, is_isolated: bool) -> None:
        self._table = table
        self._is_isolated = is_isolated

    def resident_bytes(self) -> int:
        """Sum up the resident memory of the task's processes; 0 without a pid namespace, where they cannot be told
        apart.
        """
        if not self._is_isolated:
            return 0
        return sum(int(fields[1]) * _PAGE for pid, fields in self._tell("statm") if pid != 1)

    def end(self, child: int) -> tuple[int, struct_rusage]:
        """Kill every process of the task and wait for each; return the wait status and resource usage of `child`."""
        found: tuple[int, struct_rusage] | None = None
        while True:
            # To process 1, -1 is everyone else. Elsewhere orphans become children of this process, and have their turn.
            own = os.getpid()
            targets = [-1] if self._is_isolated else [pid for pid, told in self._tell("stat") if int(told[1]) == own]
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                pid, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                assert found is not None, f"nobody else waits for {child}"
                return found
            if pid == child:
                found = status, usage

    def _tell(self, name: str) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the numbers in /proc/PID/`name` of each process; for `stat`, those after the process's name."""
        for entry in os.listdir(self._table):
            if entry.isdigit():
                with suppress(FileNotFoundError, ProcessLookupError):
                    file = os.open(f"{entry}/{name}", os.O_RDONLY, dir_fd=self._table)
                    try:
                        told = os.read(file, 4096)
                    finally:
                        os.close(file)
                    yield int(entry), told.rpartition(b")")[2].split()
