"""Share segments of device memory between two processes that use the same device (CUDA IPC)."""

import base64
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from megarl.device.platform import platform

# The position of the device index among the arguments of torch's function that opens a handle.
_DEVICE = 6


class DeviceSegments:
    """Device memory shared between two processes by name; its CUDA IPC handles are exchanged through a TCPStore."""

    def __init__(self, store: dist.TCPStore, device: torch.device) -> None:
        self._store, self._device = store, device

    def create(self, path: Path, num_bytes: int) -> torch.Tensor:
        """Allocate a uint8 tensor [num_bytes] that the other process can `open`, as long as this tensor exists."""
        segment = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # The store only takes text.
        self._store.set(str(path), base64.b64encode(pickle.dumps(reduce_tensor(segment))).decode())
        return segment

    def open(self, path: Path) -> torch.Tensor:
        """Return the tensor that the other process created under this path; the two may number the device
        differently.
        """
        rebuild, arguments = pickle.loads(base64.b64decode(self._store.get(str(path))))
        own = [*arguments]
        own[_DEVICE] = self._device.index
        segment: torch.Tensor = rebuild(*own)
        return segment

    def synchronize(self) -> None:
        """Wait until this process's copies have finished, because the other process cannot wait for its CUDA stream."""
        platform().synchronize()
