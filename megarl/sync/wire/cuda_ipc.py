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
    """Device memory shared by name: the sender creates it, the receiver opens it, and a rendezvous store carries the
    handles.
    """

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store

    def create(self, path: Path, num_bytes: int) -> torch.Tensor:
        """Allocate a tensor [num_bytes] uint8 that the other process can open as long as this tensor lives."""
        segment = torch.empty(num_bytes, dtype=torch.uint8, device=platform().device())
        # The store only takes text.
        self._store.set(str(path), base64.b64encode(pickle.dumps(reduce_tensor(segment))).decode())
        return segment

    def open(self, path: Path) -> torch.Tensor:
        """Return the memory that the other process created, as a tensor on this process's device (device indices may
        differ).
        """
        rebuild, arguments = pickle.loads(base64.b64decode(self._store.get(str(path))))
        own = [*arguments]
        own[_DEVICE] = platform().device_index()
        segment: torch.Tensor = rebuild(*own)
        return segment

    def synchronize(self) -> None:
        """Wait until copies to or from segments are done, because the other process does not see this one's stream."""
        platform().synchronize()
