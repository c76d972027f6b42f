"""Signal between processes of one host: a flag in memory that both map, and a semaphore that wakes the waiting one."""

import ctypes
import errno
import time

import numpy as np
import torch

# A line of the processor's cache: two flags are never on the same one.
FLAG_BYTES = 64
_SEMAPHORE_AT = 16
_COUNT_BITS = 32
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_libc.sem_post.argtypes = [ctypes.c_void_p]


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time)]


class Flag:
    """How far a process is: the number of the weight sync, and how many messages it has sent (or taken) in it.

    One process advances the flag, and one waits. The waiting one sleeps in the kernel, and after it wakes it sees all
    that the other wrote before.

    memory: uint8 [FLAG_BYTES], at an address that is a multiple of 16. is_new: it is zero, and nobody uses it yet.
    """

    def __init__(self, memory: torch.Tensor, *, is_new: bool) -> None:
        self._state = memory[:8].numpy().view(np.uint64)
        self._semaphore = memory.data_ptr() + _SEMAPHORE_AT
        if is_new:
            _libc.sem_init(self._semaphore, 1, 0)

    def advance(self, transfer: int, count: int) -> None:
        """Say that this process has sent (or taken) `count` messages in the weight sync `transfer`."""
        # One store of eight bytes: nobody sees the one number without the other.
        self._state[0] = transfer << _COUNT_BITS | count
        _libc.sem_post(self._semaphore)

    def wait(self, transfer: int, count: int, timeout_s: float) -> bool:
        """Wait until the other process has come that far, and return True, or False after `timeout_s`."""
        end = _Time(*divmod(time.monotonic_ns() + int(timeout_s * 1e9), 10**9))
        while True:
            is_awake = _libc.sem_clockwait(self._semaphore, time.CLOCK_MONOTONIC, ctypes.byref(end)) == 0
            its_transfer, its_count = divmod(int(self._state[0]), 1 << _COUNT_BITS)
            if its_transfer == transfer and its_count >= count:
                return True
            if not is_awake and ctypes.get_errno() != errno.EINTR:
                return False
