"""Make system calls that Python 3.11 does not offer, and name the step of confinement in which one was refused."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1 << 5, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
# Calls without a function in every libc. New calls have one number on all machines.
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


class StepError(Exception):
    """The error of one step in confining a program."""

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(f"{name}: {error}")
        self.name = name
        self.reason = error.strerror or str(error)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Turn system errors inside this context into StepErrors that name the step, so that a message can say what is
    missing.
    """
    try:
        yield
    except OSError as error:
        raise StepError(name, error) from error


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def _checked(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call that no library offers; OSError if it fails."""
    typed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *typed)), f"system call {number}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), flags, options.encode())
    _checked(_libc.mount(*arguments), f"mount {kind} on {target}")


def unmount(target: str) -> None:
    """Detach a mount at once, even if something still uses it."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def restrict_mounts(target: str, flags: int) -> None:
    """Set `flags` (MS_RDONLY and similar) on the mount at `target` and on all mounts below it."""
    attributes = _MountAttributes(attr_set=flags)
    arguments = (_AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
    _checked(_libc.syscall(_MOUNT_SETATTR, *arguments), f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    _checked(_libc.syscall(_PIVOT_ROOT[os.uname().machine], new.encode(), old.encode()), "pivot_root")


def prctl(option: int, value: int = 0, pointer: int = 0) -> None:
    _checked(_libc.prctl(option, value, pointer, 0, 0), f"prctl {option}")


def drop_bounding_set() -> None:
    """Empty the capability bounding set, so that no program executed later can be given a capability."""
    # The highest that this kernel knows: asking for the next one fails.
    last = 0
    while _libc.prctl(PR_CAPBSET_READ, last + 1, 0, 0, 0) != -1:
        last += 1
    for capability in range(last + 1):
        prctl(PR_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    """Give up all capabilities of this process for good."""
    header = _CapabilityHeader(version=_CAPABILITY_VERSION_3, pid=0)
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(ctypes.byref(header), nothing), "capset")
