"""Let the processes of a weight sync find each other through a TCPStore on the first trainer rank's host."""

import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megarl.device.platform import gloo_group, platform
from megarl.errors import WeightSyncError

# How often a wait checks whether the transfer was given up.
POLL_S = 0.5
_CONNECT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The settings for a rendezvous: the TCPStore's address, this process's rank among `size`, and the timeout."""

    address: str
    port: int
    rank: int
    size: int
    timeout_s: float

    def connect(self) -> dist.TCPStore:
        """Return a client of the rendezvous's TCPStore."""
        timeout = timedelta(seconds=self.timeout_s)
        return dist.TCPStore(self.address, self.port, is_master=False, timeout=timeout)

    def join(self, *, over_devices: bool) -> dist.ProcessGroup:
        """Make a process group of all `size` processes, over the devices' links (NCCL) or the network (gloo).

        Every process must call this at the same time.
        """
        group = platform().new_group if over_devices else gloo_group
        return group(self.connect(), self.rank, self.size, timedelta(seconds=self.timeout_s))


def open_store(address: str) -> dist.TCPStore:
    """Start a TCPStore server on a free port of this host; it stops when the returned object is freed."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)


def give_up(address: str, port: int, transfer: int) -> None:
    """Mark the weight sync `transfer` as failed, so that no process waits for one that has died."""
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set(f"{transfer}/given up", "")


def is_said(store: dist.Store, key: str, transfer: int, timeout_s: float) -> bool:
    """Wait until `key` is set in the store, and return True; return False after `timeout_s`.

    Raises:
        WeightSyncError: the weight sync `transfer` was given up, because a process has died.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            store.wait([key], timedelta(seconds=min(POLL_S, left_s)))
            return True
        except dist.DistStoreError:
            if store.check([f"{transfer}/given up"]):
                raise WeightSyncError("a process that took part in this sync has died") from None
    return False
