"""Let the processes of a weight sync exchange keys in a key-value store (torch's TCPStore) on the first trainer
rank.
"""

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
    """The settings of a rendezvous: the store's address, this process's rank among `size`, and the time-out."""

    address: str
    port: int
    rank: int
    size: int
    timeout_s: float

    def connect(self) -> dist.TCPStore:
        """Connect this process to the key-value store."""
        timeout = timedelta(seconds=self.timeout_s)
        return dist.TCPStore(self.address, self.port, is_master=False, timeout=timeout)

    def join(self, *, over_devices: bool) -> dist.ProcessGroup:
        """Form a process group of all processes, over the devices' links (NCCL) or the network (gloo).

        Every process must call this at the same time.
        """
        group = platform().new_group if over_devices else gloo_group
        return group(self.connect(), self.rank, self.size, timedelta(seconds=self.timeout_s))


def open_store(address: str) -> dist.TCPStore:
    """Open a store on a free port of this host; it lives as long as the returned object."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)


def give_up(address: str, port: int, transfer: int) -> None:
    """Make every process that waits in a transfer (one weight sync) fail, because one of them has died."""
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set(f"{transfer}/given up", "")


def is_said(store: dist.Store, key: str, transfer: int, timeout_s: float) -> bool:
    """Wait until a key is set in the store; return False if that does not happen in time.

    Raises:
        WeightSyncError: the transfer was given up.
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
