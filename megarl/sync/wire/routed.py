"""Route each message of a weight sync: shared memory within a host, and a process group between hosts.

Engines that share the trainer's devices cannot join a process group over devices (NCCL), which takes no device twice.
There the group has the trainer's ranks only: the rank on an engine worker's device receives that worker's messages from
other hosts, and passes them on to it in the memory of the device.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from megarl.sync.plan.build import Parcel
from megarl.sync.wire.point_to_point import Exchange, PointToPointReceiver
from megarl.sync.wire.shared_memory import SharedMemoryReceiver, SharedMemorySender
from megarl.sync.wire.wires import Arrival, Share, pack

_NEVER = 1 << 62


class RoutedSender:
    """The sender of a trainer rank, which also passes on messages from ranks of other hosts (`Share.passed`)."""

    def __init__(self, share: Share, device: torch.device) -> None:
        self._hosts = share.hosts
        near = [message for message in share.messages if self._is_near(message)]
        far = [message for message in share.messages if not self._is_near(message)]
        # What is passed on stays on the device, like what the worker gets from this rank itself.
        near += [message._replace(local=True) for message in share.passed]
        self._near = SharedMemorySender(replace(share, messages=tuple(near)), device)
        # All members must join the group at the same time, even those without messages on it.
        self._far = Exchange(replace(share, messages=(*far, *share.passed)), device) if share.num_hosts > 1 else None
        self._passed = defaultdict[int, list[Parcel]](list)
        for message in share.passed:
            self._passed[message.bucket].append(message)
        self._steps = sorted({message.bucket for message in (*far, *share.passed)})
        self._num_posted, self._arriving = 0, list[Parcel]()

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer` on both wires (shared memory and process group)."""
        self._num_posted, self._arriving = 0, []
        self._near.start(transfer)
        if self._far is not None:
            self._far.start(transfer)

    def send(self, message: Parcel, parts: Iterable[torch.Tensor]) -> None:
        """Send a message through shared memory if its receiver is on this host, else with its bucket's group."""
        self._post(before=message.bucket)
        if self._far is None or self._is_near(message):
            # Receivers read in the order of buckets: until they get what came before, they free no segment for this.
            self._pass_on()
            self._near.send(message, parts)
        else:
            pack(parts, self._far.stage(message))

    def flush(self) -> None:
        """Wait until the tensors sent in this weight sync are no longer read, so that they may change."""
        self._post(before=_NEVER)
        self._pass_on()
        if self._far is not None:
            self._far.flush()
        self._near.flush()

    def close(self) -> None:
        """Remove the shared-memory segments, and leave the process group, which closes connections between hosts."""
        self._near.close()
        if self._far is not None:
            self._far.close()
            self._far = None

    def _is_near(self, message: Parcel) -> bool:
        return self._hosts[message.source] == self._hosts[message.sink]

    def _post(self, *, before: int) -> None:
        """Post the groups of all buckets up to one; while a bucket comes in, the one before is passed on."""
        while self._far is not None and self._num_posted < len(self._steps) and self._steps[self._num_posted] < before:
            arriving = self._passed[self._steps[self._num_posted]]
            self._num_posted += 1
            for message in arriving:
                self._far.stage(message)
            self._far.post()
            self._pass_on()
            self._arriving = arriving

    def _pass_on(self) -> None:
        for message in self._arriving:
            assert self._far is not None
            self._near.send(message, [self._far.arrived(message)])
        self._arriving = []


class RoutedReceiver:
    """The receiver of an engine worker: from its own host, also if passed on there, and from other hosts."""

    def __init__(self, share: Share, device: torch.device) -> None:
        self._far_sources = {
            message.source
            for message in share.messages
            if not share.relays and share.hosts[message.source] != share.hosts[message.sink]
        }
        near = [
            message._replace(local=message.local or share.hosts[message.source] != share.hosts[message.sink])
            for message in share.messages
            if message.source not in self._far_sources
        ]
        self._near = SharedMemoryReceiver(replace(share, messages=tuple(near)), device)
        self._far: PointToPointReceiver | None = None
        if share.num_hosts > 1 and not share.relays:
            far = [message for message in share.messages if message.source in self._far_sources]
            self._far = PointToPointReceiver(replace(share, messages=tuple(far)), device)

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer` on both wires (shared memory and process group)."""
        self._near.start(transfer)
        if self._far is not None:
            self._far.start(transfer)

    def expect(self, messages: Iterable[Parcel]) -> None:
        """Post receives for messages from other hosts; messages through shared memory need none."""
        if self._far is not None:
            self._far.expect(message for message in messages if message.source in self._far_sources)

    def receive(self, message: Parcel) -> Arrival:
        """Wait for a message, through shared memory if its sender is on this host, else over the process group."""
        return self._end(message).receive(message)

    def release(self, message: Parcel) -> None:
        """Let the buffer or segment of a message be reused, after the message has been read."""
        self._end(message).release(message)

    def close(self) -> None:
        """Leave the process group, which closes the connections between hosts."""
        if self._far is not None:
            self._far.close()
            self._far = None

    def _end(self, message: Parcel) -> SharedMemoryReceiver | PointToPointReceiver:
        return self._far if self._far is not None and message.source in self._far_sources else self._near


def passed_on(messages: Iterable[Parcel], relays: dict[int, int], hosts: Sequence[str]) -> dict[int, list[Parcel]]:
    """Return, by rank, the messages from other hosts that it passes on to the engine worker on its device."""
    far = (message for message in messages if relays and hosts[message.source] != hosts[message.sink])
    by_rank = itertools.groupby(sorted(far, key=lambda each: relays[each.sink]), key=lambda each: relays[each.sink])
    return {rank: list(its) for rank, its in by_rank}
