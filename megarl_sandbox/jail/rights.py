"""Take rights away from a child process before it runs code of the program."""

import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from megarl_sandbox.jail import kernel, landlock, syscalls
from megarl_sandbox.jail.namespaces import PROGRAM_ID, become
from megarl_sandbox.options import Isolation

MIB = 2**20
_STACK_MIB = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of `megarl_sandbox.options.Limits` as they arrive on this side, and what isolates programs.

    paths: files and directories that programs may read. may_execute: whether they may also execute those, and write
    anywhere else in their own file system; only with namespaces. user: whom they run as under Landlock; None: whoever
    this is.
    """

    cpu_s: int
    wall_s: float
    memory_mib: int
    processes: int
    files_mib: int
    files: int
    output_bytes: int
    isolation: Isolation
    paths: Sequence[str]
    may_execute: bool = False
    user: int | None = None


def give_up_rights(bounds: Bounds, scratch: str, keeper: int) -> None:
    """Give up rights for good: nothing that this process executes later can regain them.

    scratch: the directory that programs may write to. keeper: the parent, with which this process ends.
    """
    limits = {
        resource.RLIMIT_AS: bounds.memory_mib * MIB,
        resource.RLIMIT_STACK: _STACK_MIB * MIB,
        resource.RLIMIT_FSIZE: bounds.files_mib * MIB,
        resource.RLIMIT_NOFILE: bounds.files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: bounds.processes,
    }
    if bounds.isolation is Isolation.NAMESPACES:
        # Without a user namespace it would count everything else that this user runs.
        limits[resource.RLIMIT_NPROC] = bounds.processes
    for kind, value in limits.items():
        _limit(kind, value)
    # One second more, for programs that ignore the signal that comes at the limit.
    _limit(resource.RLIMIT_CPU, bounds.cpu_s, bounds.cpu_s + 1)
    if bounds.isolation is Isolation.NAMESPACES:
        kernel.drop_bounding_set()
        become(PROGRAM_ID)
    elif bounds.user is not None:
        become(bounds.user)
    kernel.drop_capabilities()
    if bounds.isolation is not Isolation.NAMESPACES:
        # A pid namespace ends with its first process. After a change of user, which cancels it.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        # So does this: the keeper looks at the files that a program holds.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        if os.getppid() != keeper:
            # It ended before it could be tied to this process.
            os._exit(1)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if bounds.isolation is Isolation.LANDLOCK:
        landlock.restrict_files(bounds.paths, scratch)
    syscalls.allow_only_listed_calls(one_process=bounds.isolation is Isolation.LANDLOCK, may_execute=bounds.may_execute)


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, but never above the limit already in force."""
    ceiling = resource.getrlimit(kind)[1]
    hard = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))
