"""Measure the memory of a task's processes, and end them."""

import os
import signal
from contextlib import suppress
from resource import struct_rusage

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Family:
    """All processes that a task starts: the descendants of this process.

    table: a descriptor of a /proc that shows this process. It may be one of an outer pid namespace: a new one could not
        be mounted in a container that masks parts of its own.
    kills_all: this is process 1 of a pid namespace, so that all others in it belong to the task.
    """

    def __init__(self, table: int, *, kills_all: bool) -> None:
        self._table = table
        self._kills_all = kills_all
        # This process's number in the table.
        self._own = int(os.readlink("self", dir_fd=table))
        # Kernels can be built without it.
        self._lists_children = "children" in self._list(f"{self._own}/task/{self._own}")

    def resident_bytes(self) -> int:
        """Sum up the resident memory of the task's processes."""
        total, parents = 0, [self._own]
        while parents:
            children = [child for parent in parents for child in self._children(parent)]
            total += sum(int(told[1]) for child in children if (told := self._read(f"{child}/statm").split()))
            parents = children
        return total * _PAGE

    def send(self, number: int) -> None:
        """Send a signal to every process of the task that can still get one."""
        # To process 1, -1 is everyone else. Elsewhere orphans become children of this process, and have their turn.
        for pid in [-1] if self._kills_all else self._children(self._own):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> dict[int, tuple[int, struct_rusage]]:
        """Kill every process of the task and wait for each; return the wait status and resource usage of each."""
        ended: dict[int, tuple[int, struct_rusage]] = {}
        while True:
            self.send(signal.SIGKILL)
            try:
                pid, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                return ended
            ended[pid] = status, usage

    def _children(self, parent: int) -> list[int]:
        """List the children that any thread of a process started."""
        if self._lists_children:
            files = [f"{parent}/task/{thread}/children" for thread in self._list(f"{parent}/task")]
            return [int(child) for file in files for child in self._read(file).split()]
        told = {pid: self._read(f"{pid}/stat").rpartition(b")")[2].split() for pid in self._list(".")}
        return [int(pid) for pid, fields in told.items() if len(fields) > 1 and int(fields[1]) == parent]

    def _list(self, path: str) -> list[str]:
        """List a directory of the table; empty if its process has ended."""
        try:
            directory = os.open(path, os.O_RDONLY, dir_fd=self._table)
        except OSError:
            return []
        try:
            return os.listdir(directory)
        except OSError:
            return []
        finally:
            os.close(directory)

    def _read(self, path: str) -> bytes:
        """Read a short file below /proc, such as `42/statm`; return nothing if its process has ended."""
        try:
            file = os.open(path, os.O_RDONLY, dir_fd=self._table)
        except OSError:
            return b""
        try:
            return os.read(file, 1 << 16)
        except ProcessLookupError:
            return b""
        finally:
            os.close(file)
