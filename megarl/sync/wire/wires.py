"""The seam between the plan and what carries its messages: tensors to send end to end, tensors to read into.

A wire carries at most `DEPTH` messages of a pair at a time, so that packing, carrying and unpacking overlap and what
is staged stays bounded.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megarl.sync.plan.build import Holding, Parcel
from megarl.sync.wire.meetings import Meeting
from megarl.weights.safetensors_map import TensorSpec

DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process needs of a plan: its messages, the full tensors, and for a sink what it needs of them.

    segments: the path that names of shared memory begin with; meeting: where the processes of the plan meet, in which
    each has its number in the plan; hosts: of every process; over_devices: whether messages between hosts use the
    devices' own connections, or else the network; delta: whether messages that travel are differences from their last
    versions; cuda_ipc: whether what neighbours exchange stays on their device.
    """

    messages: tuple[Parcel, ...]
    specs: Mapping[str, TensorSpec]
    needs: Holding
    segments: str
    meeting: Meeting
    hosts: tuple[str, ...]
    over_devices: bool = False
    delta: bool = False
    cuda_ipc: bool = False

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))

    def join(self) -> dist.ProcessGroup:
        """Form the process group that carries messages between hosts; every process must call this at the same time."""
        return self.meeting.join(over_devices=self.over_devices)


class SendingEnd(Protocol):
    """A source's end. Messages of a pair go in the plan's order."""

    def start(self, transfer: int) -> None:
        """Begin a transfer; numbers do not repeat, and are the same at both ends."""

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Send the message: tensors of any strides, end to end. They must not change before `flush` returns."""

    def flush(self) -> None:
        """Return when nothing of what was sent is read from its tensors any more."""


class Arrival:
    """A message at its sink, in a buffer; it is read once and from its beginning."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._rest = buffer

    def read(self, targets: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Fill tensors of any strides, end to end, with the next bytes of the message; yield each once it is full."""
        for target in targets:
            target.copy_(_first(self._rest, target))
            self._rest = self._rest[target.nbytes :]
            yield target


class ReceivingEnd(Protocol):
    """A sink's end."""

    def start(self, transfer: int) -> None:
        """As the source's."""

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Messages to be received next; they may begin to arrive."""

    def receive(self, message: Parcel) -> Arrival:
        """The message, to be read."""

    def release(self, message: Parcel) -> None:
        """The message has been read."""


def pack(parts: Iterable[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy tensors into a buffer, end to end."""
    for part in parts:
        _first(buffer, part).copy_(part)
        buffer = buffer[part.nbytes :]


def _first(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of a buffer as a tensor like another."""
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
