"""Define what a transport is: a way, such as shared memory or a process group, to carry messages of a weight sync.

A message consists of tensors laid end to end. At most `DEPTH` messages per (source, receiver) pair are in flight, so
that packing, carrying and unpacking overlap while staging memory stays bounded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal, NamedTuple, TypeAlias

import torch

from megarl.config.plugins import Plugin
from megarl.sync.plan.assign import Holding
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.rendezvous import Rendezvous
from megarl.weights.safetensors_map import TensorSpec

DEPTH = 2
# Comes after every bucket.
NEVER = 1 << 62
# Source, receiver and turn, which identify a message within its plan.
Key: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection from a trainer rank to an engine worker, and what the settings ask of such a link.

    same_device: whether both use the same device. beside_rank: whether the worker shares its device with some rank.
    host_group: what carries messages between hosts. cuda_ipc: whether processes may share a device's memory.
    delta: whether to send differences from the last sync. nearby: whether what carries messages between hosts also
    carries those within a host, because that is faster than the host's memory.
    """

    same_host: bool
    same_device: bool
    beside_rank: bool
    host_group: Literal["gloo", "device"]
    cuda_ipc: bool
    delta: bool
    nearby: bool = False

    @property
    def is_grouped(self) -> bool:
        """Return whether a process group of devices (NCCL) carries the messages; differences are made in host memory,
        from which it does not send.
        """
        apart = not self.same_host or (self.nearby and not self.same_device)
        return self.host_group == "device" and apart and not self.delta


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process's part of a sync plan: the messages that it sends or receives, and how to reach other
    processes.

    messages: in the plan's order. specs: the full tensors. needs: the boxes of each tensor that an engine worker needs.
    segments: path prefix of shared-memory files. rendezvous: the rendezvous of all processes; its ranks are their
    numbers in the plan. transports: by the name of each transport that this process opens, the messages that it sends,
    receives or passes on over it. beside: by engine worker, the rank that shares its device. plugins: what registers
    transports of users.
    """

    messages: tuple[WeightMessage, ...]
    specs: Mapping[str, TensorSpec]
    needs: Holding
    segments: str
    rendezvous: Rendezvous
    transports: Mapping[str, tuple[WeightMessage, ...]] = field(default_factory=dict)
    beside: Mapping[int, int] = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()

    def over(self, transport: str) -> "ProcessPlan":
        """Return the process plan with only the messages that one transport carries."""
        return replace(self, messages=self.transports[transport])


class SendingEnd:
    """The sending end of a transport on a trainer rank. Messages to one receiver must be sent in the plan's order."""

    def start(self, transfer: int) -> None:
        """Begin a weight sync. Its number `transfer` must be new, and the same in all processes."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forget what earlier syncs have sent, so that all messages of the next one are sent in full."""

    def post(self, before: int) -> None:
        """Set off what is held back until all messages of a bucket are there, for all buckets up to `before`."""

    def pass_on(self) -> None:
        """Pass on what has arrived for other processes. Called before a message is sent on another transport."""

    def send(self, message: WeightMessage, parts: Iterable[torch.Tensor]) -> None:
        """Send tensors of any strides, end to end, as one message. They must not change before `flush` returns."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait until the sent tensors are no longer read, so that they may change.

        Before, all buckets have been posted, and what arrived has been passed on.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of memory and connections that other processes use."""


class Arrival(NamedTuple):
    """A received message: its bytes, and how many of them were sent.

    stays: whether the bytes stay until `release`, which waits for copies of them to the device.
    """

    data: torch.Tensor
    num_bytes: int
    stays: bool = False


class ReceivingEnd:
    """The receiving end of a transport in an engine worker."""

    def start(self, transfer: int) -> None:
        """Begin a weight sync. Its number `transfer` must be new, and the same in all processes."""
        raise NotImplementedError

    def expect(self, messages: Iterable[WeightMessage]) -> None:
        """Announce the next messages to be received, so that their transmission may begin."""

    def receive(self, message: WeightMessage) -> Arrival:
        """Wait for a message, and return it to be read."""
        raise NotImplementedError

    def release(self, message: WeightMessage) -> None:
        """Let the buffer of a message be reused, after the message has been read."""

    def close(self) -> None:
        """Let go of connections that other processes use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The bytes in which a process stages messages: on its device, and in the host's memory."""

    device: int = 0
    host: int = 0


class Members(Enum):
    """The processes that open a transport: those that it carries messages between, and perhaps others."""

    ENDS = auto()
    RANKS = auto()  # also all trainer ranks, as they pass messages on to the engine workers on their devices
    ALL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A way to carry messages over the links that it `fits`.

    sender, receiver: open an end, given the process plan with the messages of this transport and the device of the
    process. staging: what an end allocates, given its messages and the number of its process in the plan.
    """

    name: str
    fits: Callable[[Link], bool]
    sender: Callable[[ProcessPlan, torch.device], SendingEnd]
    receiver: Callable[[ProcessPlan, torch.device], ReceivingEnd]
    staging: Callable[[Sequence[WeightMessage], int], Staging] = lambda messages, process: Staging()
    members: Members = Members.ENDS


def pack(parts: Iterable[torch.Tensor], buffer: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy tensors into a buffer of bytes, end to end. non_blocking: the caller waits for copies from the device."""
    for part in parts:
        _first(buffer, part).copy_(part, non_blocking=non_blocking)
        buffer = buffer[part.nbytes :]


def unpack(
    buffer: torch.Tensor, targets: Iterable[torch.Tensor], *, non_blocking: bool = False
) -> Iterator[torch.Tensor]:
    """Fill tensors of any strides, one after another, from a buffer of bytes; yield each when it is full.

    non_blocking: copies to the device may still be under way on its current stream.
    """
    for target in targets:
        target.copy_(_first(buffer, target), non_blocking=non_blocking)
        buffer = buffer[target.nbytes :]
        yield target


def key_of(message: WeightMessage) -> Key:
    """Return (source, receiver, turn) of a message."""
    return message.source, message.receiver, message.turn


def _first(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View the first bytes of a buffer as a tensor like `like`, with its shape and dtype."""
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
