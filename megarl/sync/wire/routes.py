"""Which wire carries which message: shared memory within a host, a process group between hosts."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from megarl.sync.plan.build import Message
from megarl.sync.wire.point_to_point import PointToPointReceiver, PointToPointSender
from megarl.sync.wire.shared_memory import SharedMemoryReceiver, SharedMemorySender
from megarl.sync.wire.wires import Arrival, ReceivingEnd, SendingEnd, Share


class RoutedSender:
    """`SendingEnd` over both wires."""

    def __init__(self, share: Share) -> None:
        near, far = _split(share)
        self._near = SharedMemorySender(near)
        self._hosts = share.hosts
        # All processes join the group at once, whatever they have to send.
        self._far = PointToPointSender(far, far.join()) if share.num_hosts > 1 else None

    def start(self, transfer: int) -> None:
        for end in self._ends():
            end.start(transfer)

    def send(self, message: Message, parts: Iterable[torch.Tensor]) -> None:
        self._end(message).send(message, parts)

    def flush(self) -> None:
        for end in self._ends():
            end.flush()

    def close(self) -> None:
        """Remove the segments, and close the connections."""
        self._near.close()
        if self._far is not None:
            self._far.close()
            self._far = None

    def _ends(self) -> list[SendingEnd]:
        return [self._near] if self._far is None else [self._near, self._far]

    def _end(self, message: Message) -> SendingEnd:
        if self._far is None or _is_near(self._hosts, message):
            return self._near
        return self._far


class RoutedReceiver:
    """`ReceivingEnd` over both wires."""

    def __init__(self, share: Share) -> None:
        near, far = _split(share)
        self._near = SharedMemoryReceiver(near)
        self._hosts = share.hosts
        self._far = PointToPointReceiver(far, far.join()) if share.num_hosts > 1 else None

    def start(self, transfer: int) -> None:
        self._near.start(transfer)
        if self._far is not None:
            self._far.start(transfer)

    def expect(self, messages: Iterable[Message]) -> None:
        if self._far is not None:
            self._far.expect(message for message in messages if not _is_near(self._hosts, message))

    def receive(self, message: Message) -> Arrival:
        return self._end(message).receive(message)

    def release(self, message: Message) -> None:
        self._end(message).release(message)

    def close(self) -> None:
        """Close the connections."""
        if self._far is not None:
            self._far.close()
            self._far = None

    def _end(self, message: Message) -> ReceivingEnd:
        if self._far is None or _is_near(self._hosts, message):
            return self._near
        return self._far


def _is_near(hosts: tuple[str, ...], message: Message) -> bool:
    return hosts[message.source] == hosts[message.sink]


def _split(share: Share) -> tuple[Share, Share]:
    near = tuple(message for message in share.messages if _is_near(share.hosts, message))
    far = tuple(message for message in share.messages if not _is_near(share.hosts, message))
    return replace(share, messages=near), replace(share, messages=far)
