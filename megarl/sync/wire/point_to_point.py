"""Carry messages between hosts by send and receive over a process group; receives are posted ahead of their use."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megarl.device.platform import platform
from megarl.sync.plan.build import Parcel
from megarl.sync.wire.wires import DEPTH, Arrival, Share, pack


class _Member:
    """A process's membership in the group, with `DEPTH` staging buffers per (source, sink) pair and their pending
    operations.
    """

    def __init__(self, share: Share, group: dist.ProcessGroup) -> None:
        self._group = group
        # Messages are staged in memory that the group can send from: on the devices, or on the host.
        self._device = platform().device() if share.over_devices else torch.device("cpu")
        self._num_turns = Counter((message.source, message.sink) for message in share.messages)
        self._sizes = dict[tuple[int, int, int], int]()
        for message in share.messages:
            slot = _slot(message)
            self._sizes[slot] = max(self._sizes.get(slot, 0), message.num_bytes)
        self._buffers = dict[tuple[int, int, int], torch.Tensor]()
        self._under_way = dict[tuple[int, int, int], tuple[Parcel, Any]]()
        self._transfer = 0

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer`; pending messages of a failed earlier one are dropped."""
        self._transfer = transfer
        self._under_way.clear()

    def close(self) -> None:
        """Leave the group and close its connections, so that processes waiting for this one fail."""
        self._under_way.clear()
        del self._group

    def _bytes_of(self, message: Parcel) -> torch.Tensor:
        slot = _slot(message)
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(self._sizes[slot], dtype=torch.uint8, device=self._device)
        return self._buffers[slot][: message.num_bytes]

    def _tag(self, message: Parcel) -> int:
        """Return a tag that differs between messages of a pair, also between those of different weight syncs."""
        return self._transfer * self._num_turns[message.source, message.sink] + message.turn

    def _wait(self, slot: tuple[int, int, int]) -> None:
        """Wait until the pending send or receive in a staging buffer, if any, has finished."""
        if (under_way := self._under_way.pop(slot, None)) is not None:
            under_way[1].wait()


class PointToPointSender(_Member):
    """The sender of messages over a process group (gloo or NCCL)."""

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Copy tensors into a staging buffer and start to send it. Wait first if the buffer is still being sent."""
        self._wait(_slot(message))
        buffer = self._bytes_of(message)
        pack(parts, buffer)
        self._under_way[_slot(message)] = message, self._group.send([buffer], message.sink, self._tag(message))

    def flush(self) -> None:
        """Wait until every message has been sent."""
        for slot in list(self._under_way):
            self._wait(slot)


class PointToPointReceiver(_Member):
    """The receiver of messages over a process group (gloo or NCCL)."""

    def __init__(self, share: Share, group: dist.ProcessGroup) -> None:
        super().__init__(share, group)
        self._held = set[tuple[int, int, int]]()

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer`, with all staging buffers free."""
        super().start(transfer)
        self._held.clear()

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Post receives for those messages whose staging buffers are free; `receive` posts the remaining ones."""
        for message in messages:
            if _slot(message) not in self._under_way and _slot(message) not in self._held:
                self._post(message)

    def receive(self, message: Parcel) -> Arrival:
        """Wait for a message, whose receive is posted first unless `expect` has done so."""
        if self._under_way.get(_slot(message), (None, None))[0] is not message:
            self._post(message)
        self._wait(_slot(message))
        self._held.add(_slot(message))
        return Arrival(self._bytes_of(message))

    def release(self, message: Parcel) -> None:
        """Mark the staging buffer of a message as free, after the message has been read."""
        self._held.discard(_slot(message))

    def _post(self, message: Parcel) -> None:
        work = self._group.recv([self._bytes_of(message)], message.source, self._tag(message))
        self._under_way[_slot(message)] = message, work


def _slot(message: Parcel) -> tuple[int, int, int]:
    return message.source, message.sink, message.turn % DEPTH
