"""Tensors moved between memory and a socket where they lie, whatever their strides: no buffer in between.

The kernel gathers what it sends from many pieces of memory, and scatters over many what arrived (sendmsg(2),
recvmsg(2)). Python's own calls take a memoryview per piece, of which a slice of columns has one per row; these take an
array.
"""

import ctypes
import errno
import functools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# Pieces in one call: the kernel's limit.
_MOST_PIECES = 1024
# Shorter pieces cost the kernel more than a copy costs.
_LEAST_PIECE = 128


class _Header(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("pieces", ctypes.c_void_p),
        ("num_pieces", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_c = ctypes.CDLL(None, use_errno=True)
for _call in (_c.sendmsg, _c.recvmsg):
    _call.restype, _call.argtypes = ctypes.c_ssize_t, (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


class Memory:
    """Where tensors in host memory lie, end to end in row-major order, and how much of that has been moved."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Addresses do not keep memory alive.
        self._tensors = list(tensors)
        layouts = [_layout(each.shape, each.stride(), each.itemsize) for each in tensors]
        # Address and length of each piece.
        self._pieces = np.empty((sum(len(layout.starts) for layout in layouts), 2), np.uint64)
        first = 0
        for tensor, layout in zip(tensors, layouts, strict=True):
            its_pieces = self._pieces[first : first + len(layout.starts)]
            np.add(layout.starts, tensor.data_ptr(), out=its_pieces[:, 0])
            its_pieces[:, 1] = layout.piece_bytes
            first += len(layout.starts)
        # Signed as Python's numbers: else each search would convert all of them.
        self._ends = self._pieces[:, 1].cumsum(dtype=np.int64)
        self._address = self._pieces.ctypes.data
        self._first, self._num_moved = 0, 0

    @property
    def moved(self) -> bool:
        """Whether all of it was."""
        return self._first == len(self._pieces)

    def send(self, connection: socket.socket) -> bool:
        """Send what the connection takes at once; whether that was anything. Raises OSError as `socket.send`."""
        return self._move(_c.sendmsg, connection, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def receive(self, connection: socket.socket) -> bool:
        """Receive until a call's worth of pieces is full or the socket's time is over; whether that was anything.

        Raises:
            ConnectionResetError: the other end has closed the connection.
            OSError: as `socket.recv`.
        """
        return self._move(_c.recvmsg, connection, socket.MSG_WAITALL)

    def _move(self, call: Callable[..., int], connection: socket.socket, flags: int) -> bool:
        header = _Header(
            pieces=self._address + self._first * self._pieces.strides[0],
            num_pieces=min(len(self._pieces) - self._first, _MOST_PIECES),
        )
        num_bytes = call(connection.fileno(), ctypes.byref(header), flags)
        if num_bytes < 0:
            if (error := ctypes.get_errno()) in (errno.EAGAIN, errno.EINTR):
                return False
            raise OSError(error, os.strerror(error))
        if num_bytes == 0:
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
        self._num_moved += num_bytes
        self._first = int(self._ends.searchsorted(self._num_moved, side="right"))
        if not self.moved:
            # Of the next piece, what is left.
            address, length = self._pieces[self._first].tolist()
            left = int(self._ends[self._first]) - self._num_moved
            self._pieces[self._first] = address + length - left, left
        return True


def in_place(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be moved where it lies: in host memory, and not in crumbs."""
    if tensor.device.type != "cpu":
        return False
    layout = _layout(tensor.shape, tensor.stride(), tensor.itemsize)
    return len(layout.starts) < 2 or layout.piece_bytes >= _LEAST_PIECE


@dataclass(frozen=True, slots=True)
class _Layout:
    """Pieces of equal length, and where each starts from the tensor's address, in bytes."""

    starts: npt.NDArray[np.uint64]
    piece_bytes: int


@functools.lru_cache(maxsize=1 << 12)
def _layout(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> _Layout:
    """Of a tensor: its last axes, as many as lie end to end, are one piece. The layers of a model repeat."""
    axes, piece_bytes = len(shape), item_bytes
    while axes and (shape[axes - 1] == 1 or strides[axes - 1] * item_bytes == piece_bytes):
        axes -= 1
        piece_bytes *= shape[axes]
    starts = np.zeros(1 if piece_bytes else 0, np.uint64)
    for size, stride in zip(shape[:axes], strides[:axes], strict=True):
        starts = np.add.outer(starts, np.arange(size, dtype=np.uint64) * np.uint64(stride * item_bytes)).ravel()
    return _Layout(starts, piece_bytes)
