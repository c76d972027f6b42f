"""Segments in the memory of a device that both ends use, each in a process of its own (CUDA IPC)."""

import base64
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from megarl.device.platform import platform

# Which argument of torch's function that opens a handle is the number of the device.
_DEVICE = 6


class DeviceSegments:
    """Segments by name, made by one end and opened by the other; the store carries their handles."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store

    def create(self, path: Path, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 that the other end can open while this tensor lives."""
        segment = torch.empty(num_bytes, dtype=torch.uint8, device=platform().device())
        # The store takes text.
        self._store.set(str(path), base64.b64encode(pickle.dumps(reduce_tensor(segment))).decode())
        return segment

    def open(self, path: Path) -> torch.Tensor:
        """The memory itself, on this process's device: it may have another number here than in the other process."""
        rebuild, arguments = pickle.loads(base64.b64decode(self._store.get(str(path))))
        own = [*arguments]
        own[_DEVICE] = platform().device_index()
        segment: torch.Tensor = rebuild(*own)
        return segment

    def synchronize(self) -> None:
        """Return when copies to or from segments are done: the other process does not see this one's stream."""
        platform().synchronize()
