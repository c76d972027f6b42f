"""Carry each message over the right wire: shared memory within a host, a process group between hosts."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from megarl.sync.plan.build import Parcel
from megarl.sync.wire.point_to_point import PointToPointReceiver, PointToPointSender
from megarl.sync.wire.shared_memory import SharedMemoryReceiver, SharedMemorySender
from megarl.sync.wire.wires import Arrival, Share

Near = TypeVar("Near", SharedMemorySender, SharedMemoryReceiver)
Far = TypeVar("Far", PointToPointSender, PointToPointReceiver)


class _Routed(Generic[Near, Far]):
    """A sender or receiver for each of two ways: shared memory within a host, and a process group between hosts, if
    any.
    """

    def __init__(self, share: Share, near_end: type[Near], far_end: type[Far]) -> None:
        self._hosts = share.hosts
        near = [message for message in share.messages if self._is_near(message)]
        far = [message for message in share.messages if not self._is_near(message)]
        self._near: Near = near_end(replace(share, messages=tuple(near)))
        # All processes must join the group at the same time, even those without messages on it.
        self._far: Far | None = None
        if share.num_hosts > 1:
            self._far = far_end(replace(share, messages=tuple(far)), share.join())

    def start(self, transfer: int) -> None:
        """Begin a transfer on both wires."""
        self._near.start(transfer)
        if self._far is not None:
            self._far.start(transfer)

    def close(self) -> None:
        """Close the connections between hosts."""
        if self._far is not None:
            self._far.close()
            self._far = None

    def _is_near(self, message: Parcel) -> bool:
        return self._hosts[message.source] == self._hosts[message.sink]

    def _end(self, message: Parcel) -> Near | Far:
        return self._near if self._far is None or self._is_near(message) else self._far


class RoutedSender(_Routed[SharedMemorySender, PointToPointSender]):
    """A sender that takes shared memory to processes of its host, and a process group to others."""

    def __init__(self, share: Share) -> None:
        super().__init__(share, SharedMemorySender, PointToPointSender)

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Send a message over the wire (shared memory or process group) that reaches its receiver."""
        self._end(message).send(message, parts)

    def flush(self) -> None:
        """Wait until the tensors of this transfer are no longer read."""
        self._near.flush()
        if self._far is not None:
            self._far.flush()

    def close(self) -> None:
        """Remove the segments, and close the connections between hosts."""
        self._near.close()
        super().close()


class RoutedReceiver(_Routed[SharedMemoryReceiver, PointToPointReceiver]):
    """A receiver that takes shared memory from processes of its host, and a process group from others."""

    def __init__(self, share: Share) -> None:
        super().__init__(share, SharedMemoryReceiver, PointToPointReceiver)

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Let messages from other hosts begin to arrive; messages within this host need no preparation."""
        if self._far is not None:
            self._far.expect(message for message in messages if not self._is_near(message))

    def receive(self, message: Parcel) -> Arrival:
        """Wait for a message on the wire (shared memory or process group) that its sender uses."""
        return self._end(message).receive(message)

    def release(self, message: Parcel) -> None:
        """Let the wire reuse the buffer of a message, because the message has been read."""
        self._end(message).release(message)
