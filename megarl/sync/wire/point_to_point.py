"""The wire between hosts, a process group (gloo or NCCL): one send and one receive per message, posted ahead."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megarl.device.platform import platform
from megarl.sync.plan.build import Message
from megarl.sync.wire.wires import DEPTH, Arrival, Share, Staged, pack


class _Member:
    """A process of the group, with a staging buffer per pair and turn and what is under way in it."""

    def __init__(self, share: Share, group: dist.ProcessGroup) -> None:
        self.group = group
        # Messages are staged where the group can send from: on the devices, or in host memory.
        self._device = platform().device() if share.over_devices else torch.device("cpu")
        self._sizes = dict[tuple[int, int, int], int]()
        self._num_turns = Counter((message.source, message.sink) for message in share.messages)
        self._transfer = 0
        for message in share.messages:
            slot = _slot(message)
            self._sizes[slot] = max(self._sizes.get(slot, 0), message.num_bytes)
        self._buffers = dict[tuple[int, int, int], torch.Tensor]()
        self._under_way = dict[tuple[int, int, int], tuple[Message, Any]]()

    def start(self, transfer: int) -> None:
        self._transfer = transfer
        self._under_way.clear()

    def tag(self, message: Message) -> int:
        """What a message is told apart by from those of other turns, and of transfers that failed."""
        return self._transfer * self._num_turns[message.source, message.sink] + message.turn

    def bytes_of(self, message: Message) -> torch.Tensor:
        slot = _slot(message)
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(self._sizes[slot], dtype=torch.uint8, device=self._device)
        return self._buffers[slot][: message.num_bytes]

    def post(self, message: Message, work: Any) -> None:
        self._under_way[_slot(message)] = (message, work)

    def posted(self, message: Message) -> bool:
        return self._under_way.get(_slot(message), (None, None))[0] is message

    def occupied(self, message: Message) -> bool:
        return _slot(message) in self._under_way

    def wait(self, message: Message) -> None:
        """For whatever is under way in the message's buffer."""
        if (under_way := self._under_way.pop(_slot(message), None)) is not None:
            under_way[1].wait()

    def leave(self) -> None:
        """Close the connections; others who wait for this process fail."""
        self._under_way.clear()
        del self.group

    def wait_all(self) -> None:
        for message, _ in list(self._under_way.values()):
            self.wait(message)


class PointToPointSender:
    """`SendingEnd` over a process group."""

    def __init__(self, share: Share, group: dist.ProcessGroup) -> None:
        self._member = _Member(share, group)

    def start(self, transfer: int) -> None:
        self._member.start(transfer)

    def send(self, message: Message, parts: Iterable[torch.Tensor]) -> None:
        self._member.wait(message)
        pack(parts, self._member.bytes_of(message))
        work = self._member.group.send([self._member.bytes_of(message)], message.sink, self._member.tag(message))
        self._member.post(message, work)

    def flush(self) -> None:
        self._member.wait_all()

    def close(self) -> None:
        """Leave the group."""
        self._member.leave()


class PointToPointReceiver:
    """`ReceivingEnd` over a process group."""

    def __init__(self, share: Share, group: dist.ProcessGroup) -> None:
        self._member = _Member(share, group)
        self._held = set[tuple[int, int, int]]()

    def start(self, transfer: int) -> None:
        self._member.start(transfer)
        self._held.clear()

    def expect(self, messages: Iterable[Message]) -> None:
        for message in messages:
            # Buffers that still hold something are posted when their turn comes.
            if not self._member.occupied(message) and _slot(message) not in self._held:
                self._post(message)

    def receive(self, message: Message) -> Arrival:
        if not self._member.posted(message):
            self._post(message)
        self._member.wait(message)
        self._held.add(_slot(message))
        return Staged(self._member.bytes_of(message))

    def release(self, message: Message) -> None:
        self._held.discard(_slot(message))

    def close(self) -> None:
        """Leave the group."""
        self._member.leave()

    def _post(self, message: Message) -> None:
        work = self._member.group.recv([self._member.bytes_of(message)], message.source, self._member.tag(message))
        self._member.post(message, work)


def _slot(message: Message) -> tuple[int, int, int]:
    return message.source, message.sink, message.turn % DEPTH
