"""Filter system calls (seccomp), to close what resource limits and namespaces leave open.

Anonymous files and System V segments hold memory that no limit of a process counts; new user namespaces give rights
back; sockets, ptrace, keyrings, bpf, io_uring and perf are kernel surface that no test program needs. It is a list of
what is refused (EPERM), so that any Python runs; the namespaces are what contains a program.
"""

import ctypes
import os
import struct
from collections.abc import Iterator

from megarl.sandbox.jail import kernel

# Number on x86_64, number on aarch64.
_REFUSED = {
    "socket": (41, 198),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
# The machines whose calls have known numbers: column above, and the kernel's name of the machine.
AUDIT_ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NEW_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
# Calls of the 32-bit-pointer interface of x86_64 carry this bit, and would slip past the numbers above.
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_MODE_FILTER = 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse_calls() -> None:
    """Install the filter for this process and its children. The process must have set no_new_privs before."""
    column, arch = AUDIT_ARCH[os.uname().machine]
    code = b"".join(_instructions(column, arch))
    program = _Program(length=len(code) // 8, instructions=code)
    kernel.prctl(kernel.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program))


def _instructions(column: int, arch: int) -> Iterator[bytes]:
    """Yield the filter in classic BPF: (code, steps if true, steps if false, operand)."""
    yield _step(_LOAD, _ARCH_AT)
    yield from _answer_if(_EQUAL, arch, _KILL, negated=True)
    yield _step(_LOAD, _NUMBER_AT)
    yield from _answer_if(_AT_LEAST, _X32_BIT, _ERRNO | _EPERM)
    for numbers in _REFUSED.values():
        yield from _answer_if(_EQUAL, numbers[column], _ERRNO | _EPERM)
    # Its flags lie in memory, out of a filter's sight; libc falls back to clone.
    yield from _answer_if(_EQUAL, _CLONE3[column], _ERRNO | _ENOSYS)
    yield from _answer_if(_EQUAL, _CLONE[column], _ALLOW, negated=True)
    yield _step(_LOAD, _FIRST_ARGUMENT_AT)
    yield from _answer_if(_ANY_BIT, _NEW_NAMESPACES, _ERRNO | _EPERM)
    yield _step(_RETURN, _ALLOW)


def _answer_if(test: int, operand: int, answer: int, *, negated: bool = False) -> Iterator[bytes]:
    yield _step(test, operand, int(negated), int(not negated))
    yield _step(_RETURN, answer)


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
