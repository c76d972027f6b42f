"""List the sockets on which processes accept connections, and hold a port for one of them."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

# The address of a run on one host, which other hosts cannot reach.
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A TCP socket that accepts connections, and the process that it belongs to."""

    pid: int
    process: str
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Return whether only this host can connect to it."""
        return ipaddress.ip_address(self.address.removeprefix("::ffff:")).is_loopback


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Find the listening sockets of processes, in the order of the processes; those that have ended have none."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            found += [
                Listener(pid=pid, process=process.name(), address=each.laddr.ip, port=each.laddr.port)
                for each in process.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN
            ]
    return found


def hold_port(address: str) -> socket.socket:
    """Return a socket that holds a free port for this user while any process has it open; it accepts no connections.

    Only this user's sockets that share ports (SO_REUSEPORT) can listen there. Else another user's program could do so
    before the server does or once it has died, answer, and get what the server is sent: keys, and what policies write.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, 0))
    return held
