"""Take rights away from a child process before it runs code of the program."""

import resource
from dataclasses import dataclass

from megarl.sandbox.jail import kernel, syscalls
from megarl.sandbox.jail.namespaces import become_program_user

MIB = 2**20
_STACK_MIB = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of `megarl.sandbox.options.Limits` as they arrive on this side, and whether namespaces are used."""

    cpu_s: int
    wall_s: float
    memory_mib: int
    processes: int
    files_mib: int
    files: int
    output_bytes: int
    is_isolated: bool


def give_up_rights(bounds: Bounds) -> None:
    """Give up rights for good: nothing that this process executes later can regain them."""
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
    if bounds.is_isolated:
        # Without a user namespace it would count everything else that this user runs.
        limits[resource.RLIMIT_NPROC] = bounds.processes
    for kind, value in limits.items():
        _limit(kind, value)
    # One second more, for programs that ignore the signal that comes at the limit.
    _limit(resource.RLIMIT_CPU, bounds.cpu_s, bounds.cpu_s + 1)
    if bounds.is_isolated:
        kernel.drop_bounding_set()
        become_program_user()
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.refuse_calls()


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, but never above the limit already in force."""
    ceiling = resource.getrlimit(kind)[1]
    hard = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))
