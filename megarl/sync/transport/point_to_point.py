"""Carry messages over a process group: what a process sends and receives in a bucket is one grouped call.

With NCCL a grouped call uses the one communicator of the group; single sends would make a communicator for each pair.
Nobody waits within a group for another order of its messages, and all processes post their groups bucket by bucket, so
there is no deadlock.

NCCL takes no device twice, so engines that use the trainer's devices cannot join its process group, which has its ranks
only: the rank on an engine worker's device relays that worker's messages from other devices to it, in memory that both
map.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megarl.errors import WeightSyncError
from megarl.host.device.platform import platform
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.rendezvous import DeathWatch
from megarl.sync.transport.ring import Ring
from megarl.sync.transport.transports import (
    DEPTH,
    Arrival,
    Key,
    Link,
    Members,
    ProcessPlan,
    ReceivingEnd,
    SendingEnd,
    Staging,
    Transport,
    key_of,
    pack,
)

_DEATH = "a process that took part in this sync has died"


class Exchange(SendingEnd, ReceivingEnd):
    """A process's membership in the group, with a ring of staging buffers, each for a bucket, and what is under way.

    It may both send and receive: a message whose source is another process is received from that. A buffer is reused
    when all messages of its last bucket have been sent, and read: who receives posts a bucket only after it has read
    the one before the last.

    device: whose links carry the messages (NCCL); None: the network (gloo).
    """

    def __init__(self, process_plan: ProcessPlan, device: torch.device | None) -> None:
        self._rank = process_plan.rendezvous.rank
        # By receiver: the member of the group that its messages are sent to, if it is not the receiver itself.
        self._via: Mapping[int, int] = {}
        # Messages are staged in memory that the group can send from: on the devices, or on the host.
        self._device = device or torch.device("cpu")
        self._num_turns = Counter((message.source, message.receiver) for message in process_plan.messages)
        self._num_arrivals = sum(message.source != self._rank for message in process_plan.messages)
        self._ring = Ring(process_plan.messages)
        self._slots = dict[int, torch.Tensor]()
        self._staged = list[WeightMessage]()
        self._under_way = dict[Key, Any]()
        self._transfer = self._num_received = 0
        # torch's stubs do not say what backends can besides sending and receiving.
        self._group: Any = process_plan.rendezvous.join(device)
        self._watch = DeathWatch(process_plan.rendezvous, self._group)

    def start(self, transfer: int) -> None:
        """Begin the weight sync number `transfer`; pending messages of a failed earlier one are dropped."""
        self._transfer, self._num_received = transfer, 0
        # Who has no messages waits for none.
        self._watch.transfer = transfer if self._num_turns else None
        for pending in (self._staged, self._under_way, self._slots):
            pending.clear()

    def close(self) -> None:
        """Leave the group and close its connections, so that processes waiting for this one fail."""
        self._under_way.clear()
        self._slots.clear()
        self._watch.close()
        self._group = None

    def stage(self, message: WeightMessage) -> torch.Tensor:
        """Take a message into the next group, and return its buffer. Wait first if the buffer is still in use."""
        reused = self._ring.places[key_of(message)].bucket - DEPTH
        for key in [key for key in self._under_way if self._ring.places[key].bucket <= reused]:
            self._wait(key)
        self._staged.append(message)
        return self._bytes_of(message)

    def post_staged(self) -> None:
        """Start to send and receive the staged messages, in one grouped call if the group can (NCCL)."""
        if not self._staged:
            return
        if self._group.supports_coalescing:
            self._group._start_coalescing(self._device)
        started = [self._start(message) for message in self._staged]
        if self._group.supports_coalescing:
            started = [self._group._end_coalescing(self._device)] * len(started)
        self._under_way |= zip(map(key_of, self._staged), started, strict=True)
        self._staged.clear()

    def post(self, before: int) -> None:
        """Post the group of the current bucket, if it comes before another one."""
        if self._staged and self._staged[0].bucket < before:
            self.post_staged()

    def send(self, message: WeightMessage, parts: Iterable[torch.Tensor]) -> None:
        """Take a message into the group of its bucket."""
        pack(parts, self.stage(message))

    def flush(self) -> None:
        """Wait until every posted message has been sent or received, and free the buffers."""
        for key in list(self._under_way):
            self._wait(key)
        self._end()

    def expect(self, messages: Iterable[WeightMessage]) -> None:
        """Post the receives of messages, those of each bucket as one group, unless that has been done before."""
        waiting = [message for message in messages if key_of(message) not in self._under_way]
        for _, bucket in itertools.groupby(waiting, key=lambda message: message.bucket):
            for message in bucket:
                self.stage(message)
            self.post_staged()

    def receive(self, message: WeightMessage) -> Arrival:
        """Wait for a message whose receive has been posted. After the last one, what was returned is all that is left
        of the buffers.
        """
        self._wait(key_of(message))
        arrival = Arrival(self._bytes_of(message), message.num_bytes)
        self._num_received += 1
        if self._num_received == self._num_arrivals:
            self._end()
        return arrival

    def _end(self) -> None:
        self._slots.clear()
        self._watch.transfer = None

    def _start(self, message: WeightMessage) -> Any:
        buffers = [self._bytes_of(message)]
        # The tag differs between messages of a pair, also between those of different weight syncs.
        tag = self._transfer * self._num_turns[message.source, message.receiver] + message.turn
        if message.source == self._rank:
            return self._group.send(buffers, self._via.get(message.receiver, message.receiver), tag)
        return self._group.recv(buffers, message.source, tag)

    def _bytes_of(self, message: WeightMessage) -> torch.Tensor:
        """Return the buffer of a message: a part of its bucket's slot, which is allocated when it is first used."""
        bucket, offset = self._ring.places[key_of(message)]
        if (slot := bucket % DEPTH) not in self._slots:
            self._slots[slot] = torch.empty(self._ring.slot_bytes[slot], dtype=torch.uint8, device=self._device)
        return self._slots[slot][offset : offset + message.num_bytes]

    def _wait(self, key: Key) -> None:
        """Wait until the send or receive of a message, if it is under way, has finished."""
        if (work := self._under_way.pop(key, None)) is None:
            return
        try:
            work.wait()
            if self._device.type != "cpu":
                # NCCL's wait is one of the stream, which an abort ends without an error.
                platform().synchronize()
        except RuntimeError:
            # Another process's abort may close the connection before this one's watch has looked.
            if not self._watch.is_given_up():
                raise
            raise WeightSyncError(_DEATH) from None
        if self._watch.has_aborted:
            raise WeightSyncError(_DEATH)


NCCL = Transport(
    name="NCCL",
    # NCCL takes no device twice.
    fits=lambda link: link.is_grouped and not link.beside_rank,
    sender=Exchange,
    receiver=Exchange,
    staging=lambda messages, _: Staging(device=sum(Ring(messages).slot_bytes)),
    members=Members.ALL,
)
GLOO = Transport(
    name="gloo",
    fits=lambda link: link.host_group == "gloo" and not link.same_host,
    sender=lambda process_plan, _: Exchange(process_plan, None),
    receiver=lambda process_plan, _: Exchange(process_plan, None),
    staging=lambda messages, _: Staging(host=sum(Ring(messages).slot_bytes)),
    members=Members.ALL,
)


class _Bundle(NamedTuple):
    """All messages for a worker in a bucket that come through the rank beside it, and the one that passes them on."""

    whole: WeightMessage
    messages: tuple[WeightMessage, ...]


def _bundles(messages: Iterable[WeightMessage], beside: Mapping[int, int]) -> list[_Bundle]:
    """Bundle messages, which are in the plan's order. In the whole they lie as in the ring of whoever receives them."""
    by_receiver = defaultdict[int, list[WeightMessage]](list)
    for message in messages:
        by_receiver[message.receiver].append(message)
    found = list[_Bundle]()
    for receiver, its in by_receiver.items():
        buckets = itertools.groupby(its, key=lambda message: message.bucket)
        for turn, ((bucket, some), size) in enumerate(zip(buckets, Ring(its).bucket_bytes, strict=True)):
            found.append(_Bundle(WeightMessage(bucket, turn, beside[receiver], receiver, True, (), size), tuple(some)))
    return found


def _onward(process_plan: ProcessPlan, bundles: Iterable[_Bundle]) -> ProcessPlan:
    """Return the process plan of the transport between a rank and the worker on its device, apart from that of its own
    messages.
    """
    return replace(
        process_plan, messages=tuple(each.whole for each in bundles), segments=f"{process_plan.segments}-relayed"
    )


class Relay(Exchange):
    """A trainer rank's membership in the group. It sends own messages, and passes those of others on by `onward`."""

    def __init__(self, process_plan: ProcessPlan, device: torch.device, onward: Transport) -> None:
        super().__init__(process_plan, device)
        self._via = process_plan.beside
        bundles = _bundles(_passed(process_plan.messages, process_plan.rendezvous.rank), process_plan.beside)
        self._onward = onward.sender(_onward(process_plan, bundles), device)
        self._coming = {
            number: list(each) for number, each in itertools.groupby(process_plan.messages, lambda m: m.bucket)
        }
        self._bundles = defaultdict[int, list[_Bundle]](list)
        for bundle in bundles:
            self._bundles[bundle.whole.bucket].append(bundle)
        self._buckets = list(self._coming)
        self._num_posted, self._arriving = 0, list[_Bundle]()

    def start(self, transfer: int) -> None:
        super().start(transfer)
        self._num_posted, self._arriving = 0, []
        self._onward.start(transfer)

    def post(self, before: int) -> None:
        """Post the groups of all buckets up to one; while a bucket comes in, the one before is passed on."""
        while self._num_posted < len(self._buckets) and self._buckets[self._num_posted] < before:
            bucket = self._buckets[self._num_posted]
            self._num_posted += 1
            for message in _passed(self._coming[bucket], self._rank):
                self.stage(message)
            self.post_staged()
            self.pass_on()
            self._arriving = self._bundles[bucket]

    def pass_on(self) -> None:
        """Pass on the last bucket that was posted.

        Receivers read in the order of buckets: until they get what came before, they free no memory for other messages.
        """
        for whole, messages in self._arriving:
            for message in messages:
                self._wait(key_of(message))
            self._onward.send(whole, [self._bytes_of(messages[0]._replace(num_bytes=whole.num_bytes))])
        self._arriving = []

    def flush(self) -> None:
        super().flush()
        self._onward.flush()

    def close(self) -> None:
        super().close()
        self._onward.close()


class RelayedReceiver(ReceivingEnd):
    """The receiver of the bundles that a `Relay` passes on."""

    def __init__(self, process_plan: ProcessPlan, device: torch.device, onward: Transport) -> None:
        bundles = _bundles(process_plan.messages, process_plan.beside)
        self._end = onward.receiver(_onward(process_plan, bundles), device)
        self._bundle_of = {key_of(message): bundle for bundle in bundles for message in bundle.messages}
        self._places = Ring(process_plan.messages).places
        self._whole = Arrival(torch.empty(0), 0)

    def start(self, transfer: int) -> None:
        self._end.start(transfer)

    def receive(self, message: WeightMessage) -> Arrival:
        """Wait for the bundle of a message if it is the first one of it, and return the message."""
        bundle = self._bundle_of[key_of(message)]
        if key_of(message) == key_of(bundle.messages[0]):
            self._whole = self._end.receive(bundle.whole)
        offset, num_bytes = self._places[key_of(message)].offset, message.num_bytes
        return self._whole._replace(data=self._whole.data[offset : offset + num_bytes], num_bytes=num_bytes)

    def release(self, message: WeightMessage) -> None:
        """Let the buffer of a bundle be reused, after its last message has been read."""
        bundle = self._bundle_of[key_of(message)]
        if key_of(message) == key_of(bundle.messages[-1]):
            self._end.release(bundle.whole)

    def close(self) -> None:
        self._end.close()


def _passed(messages: Iterable[WeightMessage], rank: int) -> list[WeightMessage]:
    return [message for message in messages if message.source != rank]


def relayed_to(onward: Transport) -> Transport:
    """Return the transport over NCCL to the rank on the worker's device, and from there on over `onward`."""

    def fits(link: Link) -> bool:
        on_device = replace(link, same_host=True, same_device=True)
        return link.is_grouped and link.beside_rank and onward.fits(on_device)

    def staging(messages: Sequence[WeightMessage], process: int) -> Staging:
        passed = _passed(messages, process)
        if any(message.receiver == process for message in passed):
            return Staging()
        bundles = _bundles(passed, dict.fromkeys((message.receiver for message in passed), process))
        beyond = onward.staging([each.whole for each in bundles], process)
        return Staging(device=sum(Ring(messages).slot_bytes) + beyond.device, host=beyond.host)

    return Transport(
        name=f"NCCL, then {onward.name}",
        fits=fits,
        sender=lambda process_plan, device: Relay(process_plan, device, onward),
        receiver=lambda process_plan, device: RelayedReceiver(process_plan, device, onward),
        staging=staging,
        members=Members.RANKS,
    )
