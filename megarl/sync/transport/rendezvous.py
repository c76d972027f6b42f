"""Let the processes of a weight sync, which share a secret, find each other through a store without passwords on the
first trainer rank's host.

A value carries a code: an HMAC of its key and itself under the secret.
"""

import hmac
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.host.clock import awake_s
from megarl.host.device.groups import abort_group, gloo_group
from megarl.host.device.platform import platform
from megarl.host.store import connect_store, read_value

_CODE_CHARS = 64
# Time limit for reading a value that is known to be there.
_READ_S = 30.0


class SignedStore:
    """A client of the store at an address, which accepts only values from processes with the same secret.

    Any user who reaches the port of a TCPStore may still delete or overwrite values, which makes readers fail.
    """

    def __init__(self, store: dist.Store, secret: bytes, address: str) -> None:
        self._store, self._secret, self._address = store, secret, address

    def set(self, key: str, value: str = "") -> None:
        """Write a value under a key."""
        self._store.set(key, self._code(key, value) + value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Wait until a key is set and return its value, or None after `timeout_s`. WeightSyncError for a forged one."""
        if (found := read_value(self._store, key, timeout_s)) is None:
            return None
        text = found.decode(errors="replace")
        code, value = text[:_CODE_CHARS], text[_CODE_CHARS:]
        if not hmac.compare_digest(code.encode(), self._code(key, value).encode()):
            raise WeightSyncError(
                f"the message {key!r} in the weight sync's store at {self._address} is not from "
                f"this run: somebody else writes there; start the run again, where nobody else reaches this address"
            )
        return value

    def is_set(self, key: str) -> bool:
        """Return whether a key is set now; a value that was written without the secret does not count."""
        try:
            return self._store.check([key]) and self.get(key, _READ_S) is not None
        except WeightSyncError:
            return False

    def _code(self, key: str, value: str) -> str:
        # A key has no zero byte, so no other key and value have the same text.
        return hmac.new(self._secret, f"{key}\0{value}".encode(), "sha256").hexdigest()


# How often a wait checks whether the transfer was given up.
POLL_S = 0.5
_CONNECT_S = 30.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The settings for a rendezvous: the store's address, this process's rank among `size`, and the timeout.

    secret: tells the processes' values from others' in the store, which other users may reach.
    """

    address: str
    rank: int
    size: int
    timeout_s: float
    secret: bytes = field(repr=False)

    def connect(self) -> SignedStore:
        """Return a client of the rendezvous's store."""
        return SignedStore(self._client(), self.secret, self.address)

    def join(self, device: torch.device | None) -> dist.ProcessGroup:
        """Make a process group of the first `size` processes, over the links of their devices (NCCL) or the network
        (gloo).

        Every one of them must call this at the same time, with the device that it computes on, or None for gloo.
        """
        store, timeout = self._client(), timedelta(seconds=self.timeout_s)
        if device is None:
            return gloo_group(store, self.rank, self.size, timeout)
        return platform().new_group(store, self.rank, self.size, timeout, device)

    def _client(self) -> dist.Store:
        # The number of clients is not known in advance.
        return connect_store(self.address, world_size=-1, timeout_s=self.timeout_s)


class DeathWatch:
    """A thread that aborts a group's operations once the current transfer is given up, as who waits in one cannot.

    transfer: the current one; None between two.
    """

    def __init__(self, rendezvous: Rendezvous, group: dist.ProcessGroup) -> None:
        self.transfer: int | None = None
        self.has_aborted = False
        self._store, self._group, self._closed = rendezvous.connect(), group, threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def close(self) -> None:
        """End the thread, and let go of the group."""
        self._closed.set()

    def is_given_up(self) -> bool:
        """Return whether the current transfer has been given up; where gloo fails, this thread may not know it yet."""
        try:
            return self._store.is_set(f"{self.transfer}/given up")
        except RuntimeError:
            # The first trainer rank has died, and with it the store: the run ends.
            return True

    def _look(self) -> None:
        while not self._closed.wait(POLL_S):
            if self.transfer is not None and self.is_given_up():
                self.has_aborted = True
                abort_group(self._group)
                break
        del self._group


def give_up(rendezvous: Rendezvous, transfer: int) -> None:
    """Mark the weight sync `transfer` as failed, so that no process waits for another that has died."""
    replace(rendezvous, timeout_s=_CONNECT_S).connect().set(f"{transfer}/given up")


def unless_given_up(
    wait: Callable[[float], Answer], store: SignedStore, transfer: int, timeout_s: float
) -> Answer | None:
    """Wait for another process by `wait`, which takes a number of seconds, until it returns something; return that, or
    None after `timeout_s`.

    Raises:
        WeightSyncError: the weight sync `transfer` was given up, because a process has died.
    """
    deadline = awake_s() + timeout_s
    while (left_s := deadline - awake_s()) > 0:
        if answer := wait(min(POLL_S, left_s)):
            return answer
        if store.is_set(f"{transfer}/given up"):
            raise WeightSyncError("a process that took part in this sync has died")
    return None
