"""Waiting at the store of a plan for what another process says there, until the transfer is given up."""

import time
from datetime import timedelta

import torch.distributed as dist

from megarl.errors import WeightSyncError

# How often a wait asks whether the transfer was given up.
POLL_S = 0.5
_CONNECT_S = 30.0


def give_up(address: str, port: int, transfer: int) -> None:
    """Let all who wait in a transfer fail: a process of it has died."""
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set(_given_up(transfer), "")


def is_said(store: dist.Store, key: str, transfer: int, timeout_s: float) -> bool:
    """Whether a key was set within the time.

    Raises:
        WeightSyncError: the transfer was given up.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            store.wait([key], timedelta(seconds=min(POLL_S, left_s)))
            return True
        except dist.DistStoreError:
            check_not_given_up(store, transfer)
    return False


def check_not_given_up(store: dist.Store, transfer: int) -> None:
    """Raise WeightSyncError if a transfer was given up."""
    if store.check([_given_up(transfer)]):
        raise WeightSyncError("a process that took part in this sync has died") from None


def _given_up(transfer: int) -> str:
    return f"{transfer}/given up"
