"""What a process may take and what becomes of it when the one that started it is gone (Linux)."""

import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_MIB = 1 << 20


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends, however that happens.

    `parent` is the process that the caller takes for its parent; it may have ended before the kernel was told.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def limit_memory(more_mib: int) -> None:
    """Allocations fail once the process has `more_mib` MiB of address space more than now. No core files."""
    most = address_space_bytes() + more_mib * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def address_space_bytes() -> int:
    return _statm(0)


def resident_mib() -> float:
    return _statm(1) / _MIB


def _statm(field: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def discard_output() -> None:
    """Standard input is empty, and what is written to standard output and error goes nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
