"""Make gloo's groups of connections that nobody else can join.

Gloo listens at a port of its own, takes whoever connects first, and numbers its connections one by one; then processes
of a group pickle objects for each other. It offers no check. So each group is built within its process: gloo is told
that all other ranks listen at ports of this process, and connects to them. Then a socket of `connect_peers` takes the
place of each connection, and gloo's own port is closed.
"""

import contextlib
import ctypes
import functools
import os
import platform
import re
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from megarl.errors import WorkerError
from megarl.host.listeners import LOOPBACK
from megarl.host.peers import connect_peers

# Where gloo listens until its port is closed. The rank with the higher address of two connects.
_OWN_ADDRESS = "127.71.76.79"
_EPOLL_CTL_ADD = 1
_WATCHED = re.compile(r"^tfd: +(\d+) events: +([0-9a-f]+) data: +([0-9a-f]+) .*ino:([0-9a-f]+)", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)


class _Event(ctypes.Structure):
    # As the kernel has it.
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]


class _Watched(NamedTuple):
    """A socket that an epoll of this process watches."""

    epoll: int
    descriptor: int
    event: _Event

    def replace(self, other: socket.socket) -> None:
        """Put another socket in the place of this one, in this process and in the epoll."""
        os.dup2(other.fileno(), self.descriptor, inheritable=False)
        other.close()
        if _libc.epoll_ctl(self.epoll, _EPOLL_CTL_ADD, self.descriptor, ctypes.byref(self.event)):
            raise OSError(ctypes.get_errno(), "gloo's epoll does not take another socket")


def _watched_sockets() -> Iterator[tuple[_Watched, socket.socket]]:
    """Yield the sockets that epolls of this process watch, each with a duplicate, which is closed afterwards."""
    for epoll in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "eventpoll" not in os.readlink(f"/proc/self/fd/{epoll}"):
                continue
            with open(f"/proc/self/fdinfo/{epoll}", encoding="ascii") as file:
                found = _WATCHED.findall(file.read())
            for descriptor, events, data, inode in found:
                # An epoll that a fork has inherited watches its parent's descriptors.
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as duplicate:
                    if os.fstat(duplicate.fileno()).st_ino == int(inode, 16):
                        event = _Event(int(events, 16), int(data, 16))
                        yield _Watched(int(epoll), int(descriptor), event), duplicate


class _Pretence(dist.Store):
    """Tells gloo of each other rank that it listens here, at a port of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._own, self.ports = rank, b"", dict[int, socket.socket]()

    def has_extended_api(self) -> bool:
        return False

    def wait(self, *_: Any) -> None:
        """Return at once: what gloo asks for is there."""

    def set(self, _key: str, value: Any) -> None:
        self._own = bytes(value)

    def get(self, key: str) -> bytes:
        """Return what gloo has said of this rank, with the address of another: name of the host, sockaddr, …"""
        if (rank := int(key.rpartition("/")[2])) == self._rank:
            return self._own
        self.ports[rank] = self.ports.get(rank) or socket.create_server((LOOPBACK, 0))
        port = self.ports[rank].getsockname()[1]
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(LOOPBACK)
        # Both texts have their lengths before them.
        start = 8 + int.from_bytes(self._own[:8], "little") + 8
        return self._own[:start] + address + self._own[start + len(address) :]


@functools.cache
def _device(_process: int) -> Any:
    """Return gloo's device of this process, at which nobody can connect; a fork has no threads of its parent."""
    device = dist.ProcessGroupGloo.create_device(hostname=_OWN_ADDRESS, lazy_init=False)
    for watched, duplicate in _watched_sockets():
        if duplicate.family == socket.AF_INET and duplicate.getsockname()[0] == _OWN_ADDRESS:
            duplicate.close()
            # It stays silent.
            watched.replace(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    return device


@functools.cache
def close_gloo() -> None:
    """Let nobody else join the gloo groups that this process makes from now on; a second call does nothing.

    Each group gets one thread instead of three. Two of torch's work, and each notes the name of the operation that it
    has finished in a string of the group's, which no lock guards. Coalesced operations have names that the heap holds:
    two that end at once free it twice, and the process aborts. The third serves the group's connections and wakes a
    hundred times a second, also when nothing is sent: the groups of a process share it, as they share a device.
    """
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.__init__

    def make_closed(
        self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta = default_pg_timeout
    ) -> None:
        options, pretence = gloo._Options(), _Pretence(rank)
        options._devices, options._threads, options._timeout = [_device(os.getpid())], 1, timeout
        make(self, pretence, rank, size, options)
        if size == 1:
            return
        peers = connect_peers(dist.PrefixStore("peers", store), rank, size, timeout.total_seconds())
        ranks = {port.getsockname(): other for other, port in pretence.ports.items()}
        pairs = dict[int, _Watched]()
        for watched, duplicate in _watched_sockets():
            with contextlib.suppress(OSError):
                pairs |= {ranks[place]: watched for place in [duplicate.getpeername()] if place in ranks}
        if pairs.keys() != peers.keys():
            raise WorkerError(
                f"gloo has connected {len(pairs)} of {len(peers)} ranks where it was told to; install the torch that "
                f"megarl requires, not {torch.__version__}"
            )
        for other, peer in peers.items():
            peer.setblocking(False)
            if peer.family != socket.AF_UNIX:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pairs[other].replace(peer)
        for port in pretence.ports.values():
            port.close()

    gloo.__init__ = make_closed
