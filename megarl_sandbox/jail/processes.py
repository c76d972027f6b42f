"""Measure the memory and the deleted files that a task's processes hold, and end them."""

import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from resource import struct_rusage
from typing import TypeAlias

# Bytes on the disk by device and inode.
Sizes: TypeAlias = dict[tuple[int, int], int]
Errors: TypeAlias = type[OSError] | tuple[type[OSError], ...]

_GONE = (FileNotFoundError, ProcessLookupError)
# Time in which a process that starts or ends must become readable.
_HIDDEN_S = 1.0
_PAUSE_S = 0.01
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessFamily:
    """All processes that a task starts: the descendants of this process.

    table: a descriptor of a /proc that shows this process. It may be one of an outer pid namespace: a new one could not
        be mounted in a container that masks parts of its own.
    kills_all: this is process 1 of a pid namespace, so that all others in it belong to the task. user: whom programs
    run as; None: as the user of this process.
    """

    def __init__(self, table: int, *, kills_all: bool, user: int | None = None) -> None:
        self._table = table
        self._kills_all = kills_all
        self._user = user
        # The device of a program's input, which is not a file of its own.
        with open(os.memfd_create("device"), "rb") as file:
            self._memory = os.fstat(file.fileno()).st_dev
        # This process's number in the table.
        self._own = int(os.readlink("self", dir_fd=table))
        # Kernels can be built without it.
        self._lists_children = "children" in self._list(f"{self._own}/task/{self._own}")

    def resident_bytes(self) -> int:
        """Sum up the resident memory of the task's processes."""
        told = (self._read(f"{pid}/statm").split() for pid in self._descendants())
        return sum(int(fields[1]) for fields in told if fields) * _PAGE

    def deleted_files(self, directory: str) -> Sizes | None:
        """Return the sizes of files without a name that the task's processes hold open.

        None: what they hold cannot be told, because a file of `directory` was mapped and closed, or because a process
        hides its descriptors, as one does whose first thread has ended.
        """
        deadline = time.monotonic() + _HIDDEN_S
        while time.monotonic() < deadline:
            # Processes can be looked at from when they have given up their rights until they begin to end.
            with suppress(PermissionError), self._as_program():
                return self._look_for_deleted(os.fsencode(f"{directory}/"))
            time.sleep(_PAUSE_S)
        return None

    def _look_for_deleted(self, directory: bytes) -> Sizes | None:
        found: Sizes = {}
        for pid in self._descendants():
            _, _, told = self._read(f"{pid}/stat").rpartition(b")")
            fields = told.split()
            if not fields or fields[0] in b"ZX":
                # It has ended, unless threads live on after the first one, through which the rest is seen.
                if fields and int(fields[17]) > 1:
                    raise PermissionError
                continue
            inodes = set()
            for descriptor in self._list(f"{pid}/fd", gone=_GONE):
                with suppress(*_GONE):
                    file = os.stat(f"{pid}/fd/{descriptor}", dir_fd=self._table)
                    inodes.add(file.st_ino)
                    if stat.S_ISREG(file.st_mode) and file.st_nlink == 0 and file.st_dev != self._memory:
                        found[file.st_dev, file.st_ino] = file.st_blocks * 512
            for line in self._read(f"{pid}/maps", gone=_GONE).splitlines():
                if line.endswith(b" (deleted)"):
                    *_, inode, path = line.split(maxsplit=5)
                    if path.startswith(directory) and int(inode) not in inodes:
                        return None
        return found

    @contextmanager
    def _as_program(self) -> Iterator[None]:
        """Act as the program's user in this context: root without all capabilities may not look at its processes."""
        if self._user is not None:
            os.setegid(self._user)
            os.seteuid(self._user)
        try:
            yield
        finally:
            if self._user is not None:
                os.seteuid(0)
                os.setegid(0)

    def _descendants(self) -> Iterator[int]:
        parents = [self._own]
        while parents:
            parents = [child for parent in parents for child in self._children(parent)]
            yield from parents

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

    def _list(self, path: str, *, gone: Errors = OSError) -> list[str]:
        """List a directory of the table; empty if its process has ended, as the errors `gone` say."""
        try:
            directory = os.open(path, os.O_RDONLY, dir_fd=self._table)
        except gone:
            return []
        try:
            return os.listdir(directory)
        except gone:
            return []
        finally:
            os.close(directory)

    def _read(self, path: str, *, gone: Errors = OSError) -> bytes:
        """Read a file of the table, such as `42/statm`; return nothing if its process has ended, as in `_list`."""
        try:
            file = os.open(path, os.O_RDONLY, dir_fd=self._table)
        except gone:
            return b""
        try:
            return b"".join(iter(lambda: os.read(file, 1 << 16), b""))
        except ProcessLookupError:
            return b""
        finally:
            os.close(file)
