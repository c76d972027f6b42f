"""Define the interface of wires, which carry the messages of a weight sync; a message is tensors laid end to end.

A wire carries at most `DEPTH` messages of a pair at a time, so that packing, carrying and unpacking overlap while
staging memory stays bounded.
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
    """One process's share of a sync plan: its messages, the full tensors and, in an engine, what it needs of them.

    segments: the path with which names of shared memory begin. meeting: where the processes of the plan meet; its ranks
    are their numbers in the plan. hosts: the host of every process. over_devices: whether messages between hosts use
    the devices' own connections instead of the network. delta: whether messages that travel are sent as differences
    from their last versions. cuda_ipc: whether messages between neighbours stay on their device.
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
    """The interface for sending a rank's messages; those to one receiver must be sent in the plan's order."""

    def start(self, transfer: int) -> None:
        """Begin a transfer (one weight sync). Its number must be new, and the same for senders and receivers."""

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Send tensors of any strides end to end as one message; they must not change before `flush` returns."""

    def flush(self) -> None:
        """Wait until the tensors that were sent are no longer read, so that they may change."""


class Arrival:
    """A message that has arrived in a buffer; it is read once, from its beginning."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._rest = buffer

    def read(self, targets: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Fill tensors of any strides, end to end, with the next bytes of the message; yield each once it is full."""
        for target in targets:
            target.copy_(_first(self._rest, target))
            self._rest = self._rest[target.nbytes :]
            yield target


class ReceivingEnd(Protocol):
    """The interface for receiving the messages that are addressed to one engine worker."""

    def start(self, transfer: int) -> None:
        """Begin a transfer, as `SendingEnd.start` does."""

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Announce the messages to be received next, so that they may begin to arrive."""

    def receive(self, message: Parcel) -> Arrival:
        """Wait for a message, and return it for reading."""

    def release(self, message: Parcel) -> None:
        """Let the wire reuse the buffer of a message that has been read."""


def pack(parts: Iterable[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy tensors into a buffer, end to end."""
    for part in parts:
        _first(buffer, part).copy_(part)
        buffer = buffer[part.nbytes :]


def _first(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View the first bytes of a buffer as a tensor with the shape and dtype of `like`."""
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
