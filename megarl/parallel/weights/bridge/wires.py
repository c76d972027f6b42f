"""The seam between the plan and what carries its messages: buffers to fill, buffers that arrived.

A wire carries at most `DEPTH` messages of a pair at a time, so that packing, carrying and unpacking overlap and what
is staged stays bounded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megarl.parallel.weights.bridge.plan import Holding, Message
from megarl.parallel.weights.collective import Meeting
from megarl.safetensors_map import TensorSpec

DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process needs of a plan: its messages, the full tensors, and for a sink what it needs of them.

    segments: the path that names of shared memory begin with; meeting: where the processes of the plan meet, in which
    each has its number in the plan; hosts: of every process; over_devices: whether messages between hosts use the
    devices' own connections, or else the network; delta: whether messages that travel are differences from their last
    versions; cuda_ipc: whether what neighbours exchange stays on their device.
    """

    messages: tuple[Message, ...]
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


class SendingEnd(Protocol):
    """A source's end. Messages of a pair go in the plan's order."""

    def start(self, transfer: int) -> None:
        """Begin a transfer; numbers do not repeat, and are the same at both ends."""

    def buffer(self, message: Message) -> torch.Tensor:
        """[num_bytes] uint8 to fill, once what was in it before has been taken."""

    def send(self, message: Message) -> None:
        """Hand over the buffer."""

    def flush(self) -> None:
        """Return when everything sent has been taken."""


class ReceivingEnd(Protocol):
    """A sink's end."""

    def start(self, transfer: int) -> None:
        """As the source's."""

    def expect(self, messages: Iterable[Message]) -> None:
        """Messages to be received next; they may begin to arrive."""

    def receive(self, message: Message) -> torch.Tensor:
        """[num_bytes] uint8, once it is there."""

    def release(self, message: Message) -> None:
        """The buffer has been read."""
