"""Filter system calls (seccomp): programs may make those of a list (`calls.py`), and no others.

The list lacks sockets, executing files, new namespaces, mounts, tracing, memory that no limit counts (memfd, System
V segments), other users' identities, and whatever a later kernel brings. Nor may a program have the kernel signal
others in its place (owners of descriptors, leases), or own a datagram socket, which reaches any socket whose address it
knows. Under Landlock a program is one process: it may start threads, and send signals to itself alone. All its files
have a name or a descriptor that its keeper can see: none are under way between the ends of a socket pair.

libseccomp builds such filters, too, but it is a library of the system, which not every host has.
"""

import ctypes
import functools
import os
import struct
from collections.abc import Iterator

from megarl_sandbox.jail import calls, kernel

# The machines whose calls have known numbers: column in `calls.py`, and the kernel's name of the machine.
AUDIT_ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# Calls whose arguments decide: number on x86_64, number on aarch64.
_CLONE, _KILL, _TGKILL, _PRCTL = (56, 220), (62, 129), (234, 131), (157, 167)
_PRLIMIT, _CLONE3, _CLOSE_RANGE = (302, 261), (435, 435), (436, 436)
_FCNTL, _IOCTL, _SOCKETPAIR = (72, 25), (16, 29), (53, 199)
_OPTIONS = (kernel.PR_SET_PDEATHSIG, kernel.PR_SET_DUMPABLE)
# F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE; FIOSETOWN, SIOCSPGRP.
_OWNING = ((_FCNTL, (8, 10, 15, 1024)), (_IOCTL, (0x8901, 0x8902)))
# The first and second argument of the one kind of socket pair: AF_UNIX; SOCK_STREAM but for its flags.
_AF_UNIX, _SOCK_STREAM, _SOCKET_TYPES = 1, 1, 0x0F
# From this number on, calls are newer than the list. Libraries try them, and fall back on "no such call".
_NEWER = 441
# Calls of the 32-bit-pointer interface of x86_64 carry this bit, and would slip past the numbers.
_X32_BIT = 0x40000000
_NEW_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
# Each thread shares with the others of its process that it is one, and its descriptors.
_THREAD = 0x00010000 | 0x00000400
_CLOSE_RANGE_UNSHARE = 2

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT, _THIRD_ARGUMENT_AT = 0, 4, 16, 24, 32
_MODE_FILTER = 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def allow_only_listed_calls(*, one_process: bool, may_execute: bool = False) -> None:
    """Install the filter for this process and its children. The process must have set no_new_privs before."""
    column, arch = AUDIT_ARCH[os.uname().machine]
    code = _head(column, arch, os.getpid(), one_process) + _listed(column, one_process, may_execute)
    program = _Program(length=len(code) // 8, instructions=code)
    kernel.prctl(kernel.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program))


def _head(column: int, arch: int, own: int, one_process: bool) -> bytes:
    """Return the part of the filter, in classic BPF, that looks at the machine and at arguments."""
    code = [_step(_LOAD, _ARCH_AT), *_answer_if(_EQUAL, arch, _KILL_PROCESS, negated=True), _step(_LOAD, _NUMBER_AT)]
    code += _answer_if(_AT_LEAST, _X32_BIT, _ERRNO | _EPERM)
    # The flags of clone3 lie in memory, out of a filter's sight; libc falls back to clone.
    code += _answer_if(_EQUAL, _CLONE3[column], _ERRNO | _ENOSYS)
    if one_process:
        thread = [_step(_LOAD, _FIRST_ARGUMENT_AT), _step(_AND, _THREAD)]
        thread += _answer_if(_EQUAL, _THREAD, _ERRNO | _EPERM, negated=True)
        code += [_step(_EQUAL, _CLONE[column], 0, len(thread) + 1), *thread, _step(_RETURN, _ALLOW)]
        # Nor may one get descriptors of its own later, which the keeper would not see.
        unshare = [_step(_LOAD, _THIRD_ARGUMENT_AT), *_answer_if(_ANY_BIT, _CLOSE_RANGE_UNSHARE, _ERRNO | _EPERM)]
        code += [_step(_EQUAL, _CLOSE_RANGE[column], 0, len(unshare) + 1), *unshare, _step(_RETURN, _ALLOW)]
        for number in (_KILL[column], _TGKILL[column]):
            code += _judge(number, _EQUAL, own, if_true=_ALLOW, if_false=_ERRNO | _EPERM)
    else:
        code += _judge(_CLONE[column], _ANY_BIT, _NEW_NAMESPACES, if_true=_ERRNO | _EPERM, if_false=_ALLOW)
    # It may not outlive the sandbox nor hide its files, nor change the limits of another process.
    refusals = [each for option in _OPTIONS for each in _answer_if(_EQUAL, option, _ERRNO | _EPERM)]
    code += [_step(_EQUAL, _PRCTL[column], 0, 2 + len(refusals)), _step(_LOAD, _FIRST_ARGUMENT_AT), *refusals]
    code.append(_step(_RETURN, _ALLOW))
    code += _judge(_PRLIMIT[column], _EQUAL, 0, if_true=_ALLOW, if_false=_ERRNO | _EPERM)
    for numbers, operands in _OWNING:
        refusals = [each for operand in operands for each in _answer_if(_EQUAL, operand, _ERRNO | _EPERM)]
        code += [_step(_EQUAL, numbers[column], 0, 2 + len(refusals)), _step(_LOAD, _SECOND_ARGUMENT_AT), *refusals]
        code.append(_step(_RETURN, _ALLOW))
    # Other kinds, sent to an address, would reach sockets of the host.
    pair = [_step(_LOAD, _FIRST_ARGUMENT_AT), *_answer_if(_EQUAL, _AF_UNIX, _ERRNO | _EPERM, negated=True)]
    pair += [_step(_LOAD, _SECOND_ARGUMENT_AT), _step(_AND, _SOCKET_TYPES)]
    pair += _answer_if(_EQUAL, _SOCK_STREAM, _ERRNO | _EPERM, negated=True)
    code += [_step(_EQUAL, _SOCKETPAIR[column], 0, len(pair) + 1), *pair, _step(_RETURN, _ALLOW)]
    return b"".join(code)


@functools.cache
def _listed(column: int, one_process: bool, may_execute: bool) -> bytes:
    """Return the part of the filter that allows the calls of the list."""
    code = [
        step
        for number in calls.numbers(column, one_process=one_process, may_execute=may_execute)
        for step in _answer_if(_EQUAL, number, _ALLOW)
    ]
    code += _answer_if(_AT_LEAST, _NEWER, _ERRNO | _ENOSYS)
    return b"".join([*code, _step(_RETURN, _ERRNO | _EPERM)])


def _judge(number: int, test: int, operand: int, *, if_true: int, if_false: int) -> Iterator[bytes]:
    """Answer the call of this number by its first argument."""
    yield _step(_EQUAL, number, 0, 4)
    yield _step(_LOAD, _FIRST_ARGUMENT_AT)
    yield _step(test, operand, 0, 1)
    yield _step(_RETURN, if_true)
    yield _step(_RETURN, if_false)


def _answer_if(test: int, operand: int, answer: int, *, negated: bool = False) -> Iterator[bytes]:
    yield _step(test, operand, int(negated), int(not negated))
    yield _step(_RETURN, answer)


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
