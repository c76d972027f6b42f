"""Lay out the memory in which a process stages messages: `DEPTH` slots, each for one bucket after another."""

import functools
import itertools
import operator
from collections.abc import Iterable
from typing import NamedTuple

from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.transports import DEPTH, Key, key_of

# That of torch's allocator.
_ALIGNMENT = 512
_BUCKET, _RECEIVER = operator.attrgetter("bucket"), operator.attrgetter("receiver")


class BufferPlace(NamedTuple):
    """The place of a message: the number of its bucket among those of the ring, and its offset there in bytes."""

    bucket: int
    offset: int


class Ring:
    """The places of messages, which are given in the plan's order. Bucket number i lies in slot i % `DEPTH`.

    Messages of a bucket lie at aligned offsets, those to one receiver side by side. bucket_bytes: the length of each
    bucket; slot_bytes: that of each slot, which is allocated.
    """

    def __init__(self, messages: Iterable[WeightMessage]) -> None:
        self._buckets = [sorted(bucket, key=_RECEIVER) for _, bucket in itertools.groupby(messages, key=_BUCKET)]
        self.bucket_bytes = [sum(map(_capacity, bucket)) for bucket in self._buckets]
        self.slot_bytes = [max(self.bucket_bytes[slot::DEPTH]) for slot in range(min(DEPTH, len(self._buckets)))]

    @functools.cached_property
    def places(self) -> dict[Key, BufferPlace]:
        """Return the place of every message."""
        found = dict[Key, BufferPlace]()
        for number, bucket in enumerate(self._buckets):
            offset = 0
            for message in bucket:
                found[key_of(message)] = BufferPlace(number, offset)
                offset += _capacity(message)
        return found


def _capacity(message: WeightMessage) -> int:
    return -(-message.num_bytes // _ALIGNMENT) * _ALIGNMENT
