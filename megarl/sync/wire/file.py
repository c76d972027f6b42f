"""How the weights that the ranks write reach the hosts of all engines.

On one host the ranks write and the engines read the same file. With several, every host has a file of its own. The
ranks of a host write their slices into zeros; then the files are summed, byte by byte, over a group with one process
per host: gloo's, or the devices' own (NCCL on CUDA). A byte has one owner, so the sum is exact whatever the layout,
and no host needs to know who wrote what.
"""

import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megarl.device.platform import gloo_group, platform
from megarl.errors import WeightSyncError
from megarl.weights.safetensors_map import TensorSpec, create_file, data_bytes

# What travels at a time; gloo's own buffers are of this size.
BUCKET_BYTES = 64 << 20


class WeightTransport(Protocol):
    """Owns the file, or files, that ranks write and engines read."""

    def create(self, specs: Mapping[str, TensorSpec]) -> None:
        """Preallocate. Raises WeightSyncError where the tensors do not fit."""

    def clear(self) -> None:
        """Call before the ranks write."""

    def deliver(self) -> None:
        """Call after they wrote: what engines read becomes complete."""

    def remove(self) -> None:
        """Unlink."""


class SharedFile:
    """The transport where all ranks and engines are on the driver's host."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, specs: Mapping[str, TensorSpec]) -> None:
        create_weight_file(self._path, specs)

    def clear(self) -> None:
        """The ranks overwrite every element."""

    def deliver(self) -> None:
        """Engines map the pages that the ranks wrote."""

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class HostFile:
    """The file of one host among several, in the process that keeps it."""

    def offer(self, address: str) -> int:
        """Open the group's rendezvous on this host; returns its port."""
        self._rendezvous = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        port: int = self._rendezvous.port
        return port

    def join(
        self, address: str, port: int, rank: int, num_hosts: int, timeout_s: float, *, over_devices: bool = False
    ) -> None:
        """Join the group, over the network or over the devices' connections; all hosts at once, as for what follows."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        new_group = platform().new_group if over_devices else gloo_group
        self._group: dist.ProcessGroup | None = new_group(store, rank, num_hosts, timeout)
        self._device = platform().device() if over_devices else torch.device("cpu")

    def create(self, path: str, specs: Mapping[str, TensorSpec]) -> None:
        """Preallocate."""
        self._path = Path(path)
        create_weight_file(self._path, specs)

    def clear(self) -> None:
        """Zero all tensors."""
        data_bytes(self._path).zero_()

    def deliver(self) -> None:
        """Sum the files of all hosts, a bucket at a time."""
        assert self._group is not None, "a group that broke is joined anew"
        for bucket in data_bytes(self._path).split(BUCKET_BYTES):
            on_device = bucket.to(self._device)
            try:
                self._group.allreduce([on_device]).wait()
            except RuntimeError as error:
                # With its connections, or other hosts would wait for this one.
                self._group = None
                raise WeightSyncError(f"the group of all hosts broke: {error}") from error
            if on_device is not bucket:
                bucket.copy_(on_device)

    def remove(self) -> None:
        """Unlink, and leave the group."""
        self._path.unlink(missing_ok=True)
        self._group = None


def create_weight_file(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Preallocate a safetensors file, if its file system has room."""
    # An earlier one, of a process that died, takes room.
    path.unlink(missing_ok=True)
    needed, free = sum(spec.num_bytes for spec in specs.values()), shutil.disk_usage(path.parent).free
    if needed > free:
        raise WeightSyncError(
            f"weight sync needs {needed / 2**30:.2f} GiB in {path.parent}, {free / 2**30:.2f} GiB are free; "
            f"enlarge it, or remove what other runs left there"
        )
    create_file(path, specs)
