"""Define the interface of wires (shared memory, process groups), which carry a weight sync's messages.

A message consists of tensors laid end to end. At most `DEPTH` messages per (source, sink) pair are in flight, so that
packing, carrying and unpacking overlap while staging memory stays bounded.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megarl.sync.plan.build import Holding, Parcel
from megarl.sync.wire.meetings import Meeting
from megarl.weights.safetensors_map import TensorSpec

DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One process's share of a sync plan: the messages that it sends or receives, and how to reach other processes.

    specs: the full tensors. needs: the box of each tensor that an engine worker needs. segments: path prefix of
    shared-memory files. meeting: the rendezvous of all processes; its ranks are their numbers in the plan. hosts: the
    host of each process. over_devices: whether messages between hosts use the devices' links (NCCL), not gloo. delta:
    whether to send differences from the last sync. cuda_ipc: whether local messages stay on the device. relays: for
    each engine worker, the rank that passes on to it what comes from other hosts; empty: it is sent to the worker.
    passed: the messages that this rank passes on.
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
    relays: Mapping[int, int] = field(default_factory=dict)
    passed: tuple[Parcel, ...] = ()

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))

    def join(self, device: torch.device) -> dist.ProcessGroup:
        """Make the process group that carries messages between hosts. Every member must call this at the same time."""
        return self.meeting.join(device if self.over_devices else None)


class SendingEnd(Protocol):
    """The interface for sending a rank's messages. Messages to one receiver must be sent in the plan's order."""

    def start(self, transfer: int) -> None:
        """Begin a weight sync. Its number `transfer` must be new, and the same in all processes."""

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Send tensors of any strides, end to end, as one message. They must not change before `flush` returns."""

    def flush(self) -> None:
        """Wait until the sent tensors are no longer read, so that they may change."""


class Arrival:
    """A received message in a buffer, which `read` copies out once, from beginning to end."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._rest = buffer

    def read(self, targets: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Fill tensors of any strides, one after another, from the rest of the message; yield each when it is full."""
        for target in targets:
            target.copy_(_first(self._rest, target))
            self._rest = self._rest[target.nbytes :]
            yield target


class ReceivingEnd(Protocol):
    """The interface for receiving the messages that are addressed to one engine worker."""

    def start(self, transfer: int) -> None:
        """Begin a weight sync. Its number `transfer` must be new, and the same in all processes."""

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Announce the next messages to be received, so that their transmission may begin."""

    def receive(self, message: Parcel) -> Arrival:
        """Wait for a message, and return it to be read."""

    def release(self, message: Parcel) -> None:
        """Let the buffer of a message be reused, after the message has been read."""


def pack(parts: Iterable[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy tensors into a buffer of bytes, end to end."""
    for part in parts:
        _first(buffer, part).copy_(part)
        buffer = buffer[part.nbytes :]


def _first(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View the first bytes of a buffer as a tensor like `like`, with its shape and dtype."""
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
