"""Carry messages over NCCL to workers that share a device with a rank, through that rank.

NCCL takes no device twice, so engines that use the trainer's devices cannot join its process group. The group has the
trainer's ranks only: the rank on an engine worker's device receives that worker's messages from other devices, and
passes them on to it in memory that both process_plan, those of a bucket as one message.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.point_to_point import Exchange
from megarl.sync.transport.ring import Ring
from megarl.sync.transport.transports import (
    Arrival,
    Link,
    Members,
    ProcessPlan,
    ReceivingEnd,
    Staging,
    Transport,
    key_of,
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
