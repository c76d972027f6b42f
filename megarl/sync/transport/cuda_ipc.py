"""Carry messages between two processes that use the same device in segments of its memory (CUDA IPC)."""

import base64
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.errors import WeightSyncError
from megarl.host.device.platform import platform
from megarl.sync.transport.rendezvous import SignedStore
from megarl.sync.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender, segment_bytes
from megarl.sync.transport.transports import ProcessPlan, Staging, Transport

# CUDA's handles have 64 bytes, to which torch adds a few; those of its expandable segments list files.
_MOST_HANDLE_BYTES = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHandle:
    """The handle that opens a uint8 tensor [num_bytes] in another process.

    It has those arguments of torch's function that differ between segments.

    memory: the allocation that holds the storage of `storage_bytes`, at `storage_offset`; the tensor begins at
    `tensor_offset` in that. counter, counter_offset: where the sender sees that the receiver has let go. event, waits:
    the sender's event, and whether to wait for it.
    """

    num_bytes: int
    tensor_offset: int
    memory: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool

    @classmethod
    def of(cls, segment: torch.Tensor) -> "DeviceHandle":
        """Export a tensor of device memory, which must stay alive as long as others use it."""
        _, size, _, at, _, _, _, memory, storage_bytes, offset, _, counter, counter_offset, event, waits = (
            reduce_tensor(segment)[1]
        )
        return cls(
            num_bytes=size[0],
            tensor_offset=at,
            memory=memory,
            storage_bytes=storage_bytes,
            storage_offset=offset,
            counter=counter,
            counter_offset=counter_offset,
            event=event,
            waits=waits,
        )

    def tensor_on(self, device: torch.device) -> torch.Tensor:
        """Open the handle, and return the tensor; `device` is where it is, as this process numbers devices."""
        segment: torch.Tensor = rebuild_cuda_tensor(
            torch.Tensor,
            torch.Size([self.num_bytes]),
            (1,),
            self.tensor_offset,
            torch.storage.TypedStorage,
            torch.uint8,
            device.index,
            self.memory,
            self.storage_bytes,
            self.storage_offset,
            False,
            self.counter,
            self.counter_offset,
            self.event,
            self.waits,
        )
        return segment

    def encode(self) -> str:
        """Return the handle as JSON, with bytes in base64."""
        return json.dumps(
            {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in asdict(self).items()}
        )

    @classmethod
    def decode(cls, text: str, num_bytes: int) -> "DeviceHandle":
        """Read the handle of a tensor [num_bytes] from JSON; raise ValueError for anything else."""
        given = json.loads(text)
        types = {field.name: field.type for field in fields(cls)}
        if not isinstance(given, dict) or given.keys() != types.keys():
            raise ValueError(f"expected an object with {', '.join(types)}")
        values = dict[str, Any]()
        for name, kind in types.items():
            value: Any = given[name]
            if type(value) is not (str if kind is bytes else kind):
                raise ValueError(f"{name} is a {type(value).__name__}")
            values[name] = value = base64.b64decode(value, validate=True) if kind is bytes else value
            if kind is int and value < 0:
                raise ValueError(f"{name} is {value}")
            if kind is bytes and not 0 < len(value) <= _MOST_HANDLE_BYTES:
                raise ValueError(f"{name} has {len(value)} bytes")
        handle = cls(**values)
        if handle.num_bytes != num_bytes or handle.tensor_offset + num_bytes > handle.storage_bytes:
            raise ValueError(
                f"{handle.num_bytes} bytes at {handle.tensor_offset} of {handle.storage_bytes}, expected {num_bytes}"
            )
        return handle


class DeviceSegments:
    """Device memory shared between two processes by name; its CUDA IPC handles are exchanged through a store."""

    def __init__(self, store: SignedStore, device: torch.device, timeout_s: float) -> None:
        self._store, self._device, self._timeout_s = store, device, timeout_s

    def create(self, path: Path, num_bytes: int) -> torch.Tensor:
        """Allocate a uint8 tensor [num_bytes] that the other process can `open`, as long as this tensor exists."""
        with platform().shareable_memory():
            segment = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._store.set(str(path), DeviceHandle.of(segment).encode())
        return segment

    def open(self, path: Path, num_bytes: int) -> torch.Tensor:
        """Return the tensor [num_bytes] that the other process created under this path; the two may number the device
        differently.

        Raises:
            WeightSyncError: what is there is no handle of such a tensor, or not from this run.
        """
        text = self._store.get(str(path), self._timeout_s)
        try:
            return DeviceHandle.decode(text or "null", num_bytes).tensor_on(self._device)
        except ValueError as error:
            raise WeightSyncError(
                f"weight sync cannot open the device memory {path.name}: {error}; all processes of a run need the same "
                f"versions of megarl and torch"
            ) from error

    def copying(self) -> AbstractContextManager[None]:
        """Let copies run in the order of the device's other work; `synchronize` waits for them."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until this process's copies have finished, because the other process cannot wait for its CUDA stream."""
        platform().synchronize()


def _segments(process_plan: ProcessPlan, device: torch.device) -> DeviceSegments:
    return DeviceSegments(process_plan.rendezvous.connect(), device, process_plan.rendezvous.timeout_s)


CUDA_IPC = Transport(
    name="CUDA IPC",
    fits=lambda link: link.same_device and link.cuda_ipc,
    sender=lambda process_plan, device: SharedMemorySender(process_plan, _segments(process_plan, device)),
    receiver=lambda process_plan, device: SharedMemoryReceiver(process_plan, _segments(process_plan, device)),
    staging=lambda messages, process: Staging(device=segment_bytes(messages, process)),
)
