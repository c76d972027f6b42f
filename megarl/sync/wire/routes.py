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
    """A pair of senders or receivers: one over shared memory within the host and, if the run has several hosts, one
    over a process group.
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
        """Begin the weight sync number `transfer` on both wires (shared memory and process group)."""
        self._near.start(transfer)
        if self._far is not None:
            self._far.start(transfer)

    def close(self) -> None:
        """Leave the process group, which closes the connections between hosts."""
        if self._far is not None:
            self._far.close()
            self._far = None

    def _is_near(self, message: Parcel) -> bool:
        return self._hosts[message.source] == self._hosts[message.sink]

    def _end(self, message: Parcel) -> Near | Far:
        return self._near if self._far is None or self._is_near(message) else self._far


class RoutedSender(_Routed[SharedMemorySender, PointToPointSender]):
    """A sender that uses shared memory to processes of its own host, and a process group to other hosts."""

    def __init__(self, share: Share) -> None:
        super().__init__(share, SharedMemorySender, PointToPointSender)

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Send a message through shared memory if its receiver is on this host, else over the process group."""
        self._end(message).send(message, parts)

    def flush(self) -> None:
        """Wait until the tensors sent in this weight sync are no longer read, so that they may change."""
        self._near.flush()
        if self._far is not None:
            self._far.flush()

    def close(self) -> None:
        """Remove the shared-memory segments, and close the connections between hosts."""
        self._near.close()
        super().close()


class RoutedReceiver(_Routed[SharedMemoryReceiver, PointToPointReceiver]):
    """A receiver that uses shared memory from processes of its own host, and a process group from other hosts."""

    def __init__(self, share: Share) -> None:
        super().__init__(share, SharedMemoryReceiver, PointToPointReceiver)

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Post receives for messages from other hosts; messages through shared memory need none."""
        if self._far is not None:
            self._far.expect(message for message in messages if not self._is_near(message))

    def receive(self, message: Parcel) -> Arrival:
        """Wait for a message, through shared memory if its sender is on this host, else over the process group."""
        return self._end(message).receive(message)

    def release(self, message: Parcel) -> None:
        """Let the buffer or segment of a message be reused, after the message has been read."""
        self._end(message).release(message)
