"""Open the key-value stores of torch by which processes of a run find each other.

torch's stores ask nobody for a password. So on one host a store is a file that only this user can open. A server's port
is open to every user of its host and to who reaches its address: messages that processes act upon need a code of their
own there, as those of weight syncs have (`megarl.sync.transport.rendezvous`).
"""

import os
import socket
import tempfile
import time
from datetime import timedelta

import torch.distributed as dist

from megarl.host.clock import awake_s
from megarl.host.listeners import LOOPBACK

# The shortest and the longest time between two looks for a value.
_LOOK_S, _REST_S = 0.002, 0.01


def open_store(address: str) -> dist.TCPStore:
    """Start a TCPStore server on a free port of one address; it stops when the returned object is freed.

    Left to itself, torch would listen on all addresses of this host.
    """
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    # The store takes the descriptor over.
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def offer_store(host: str) -> tuple[dist.TCPStore | None, str]:
    """Open a store for processes that reach this one at an address of this host: a file if that is the loopback.

    Returns:
        The server, which must be kept, if there is one, and the store's address for `connect_store`.
    """
    if host == LOOPBACK:
        descriptor, path = tempfile.mkstemp(prefix="megarl-store-")
        os.close(descriptor)
        return None, f"file://{path}"
    server = open_store(host)
    return server, f"tcp://{host}:{server.port}"


def connect_store(address: str, *, world_size: int, timeout_s: float) -> dist.Store:
    """Return one of `world_size` processes' access to the store at `file://PATH` or `tcp://HOST:PORT`; -1: of any
    number.
    """
    scheme, _, place = address.partition("://")
    store: dist.Store
    if scheme == "file":
        store = dist.FileStore(place, world_size)
    else:
        host, _, port = place.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def read_value(store: dist.Store, key: str, timeout_s: float) -> bytes | None:
    """Wait until a key is set; return its value, or None after `timeout_s`.

    torch's own waits count the time for which this process is stopped, and look into a file once a second.
    """
    deadline, look_s = awake_s() + timeout_s, _LOOK_S
    while not store.check([key]):
        if awake_s() > deadline:
            return None
        time.sleep(look_s)
        look_s = min(1.2 * look_s, _REST_S)
    return bytes(store.get(key))
