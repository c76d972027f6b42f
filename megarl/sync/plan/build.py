"""Plan a weight sync: which trainer rank (source) sends which box (part of a tensor) to which engine worker (receiver).

The plan is a pure function of what sources hold and receivers need, computed once. Receiver i receives only

    R_i = |D_i| − |D_i ∩ S_i|

bytes over the wire (network or host memory). D_i is what it needs, and S_i what the sources that share its memory hold;
it copies D_i ∩ S_i from them. If several sources hold a part, the one with least to send so far sends it.
"""

import functools
import gc
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megarl.sync.plan.assign import Block, BoxRun, Holding, Hosts, Neighbours, assign, widest_first
from megarl.sync.plan.schedule import Transfer, in_order, scheduled
from megarl.weights.boxes import Box
from megarl.weights.safetensors_map import TensorSpec

# The part of a model that a bucket takes, and the bounds of a bucket. With more sources, buckets are smaller: many
# processes then wait less for each other.
_FEW_SOURCES, _PART, _PART_OF_MANY = 8, 16, 3072
_LEAST_BUCKET, _LEAST_OF_MANY, _MOST_BUCKET = 1 << 20, 16 << 20, 64 << 20
# So many blocks share a bucket at least, as larger ones would leave gaps; with many sources, smaller ones would be too
# many to plan.
_BLOCKS, _BLOCKS_OF_MANY = 4, 2
# The room in a bucket is counted in this many parts.
_PARTS_OF_BUCKET = 16


@dataclass(frozen=True, slots=True)
class Fragment:
    """A box (rectangular part) of a tensor within a message, whose bytes start at `offset` in the message."""

    tensor: str
    box: Box
    offset: int


class WeightMessage(NamedTuple):
    """One message from a trainer rank (source) to an engine worker (receiver); `turn` numbers the messages of this
    pair.

    bucket: the step of the sync in which it is sent. local: whether source and receiver share memory, so no transport
    is needed.
    """

    bucket: int
    turn: int
    source: int
    receiver: int
    local: bool
    runs: tuple[BoxRun, ...]
    num_bytes: int

    @property
    def parts(self) -> tuple[Fragment, ...]:
        """Return the boxes of tensors in the message. Computed on demand, because large models have millions."""
        found, offset = [], 0
        for run in self.runs:
            for tensor in run.tensors:
                found.append(Fragment(tensor, run.box, offset))
                offset += run.num_bytes
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a weight sync: all messages, ordered by bucket (step), with `specs` of the full tensors, `needs`, the
    boxes of each tensor per receiver, and `hosts` of the processes, as far as they are known.

    neighbours: by receiver, the sources that share its memory.
    """

    specs: Mapping[str, TensorSpec]
    needs: Mapping[int, Holding]
    messages: tuple[WeightMessage, ...]
    hosts: Hosts = field(default_factory=dict)
    neighbours: Neighbours = field(default_factory=dict)

    @functools.cached_property
    def _by_end(self) -> tuple[Mapping[int, list[WeightMessage]], Mapping[int, list[WeightMessage]]]:
        sent, received = dict[int, list[WeightMessage]](), dict[int, list[WeightMessage]]()
        for message in self.messages:
            sent.setdefault(message.source, []).append(message)
            received.setdefault(message.receiver, []).append(message)
        return sent, received

    @functools.cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Return the messages as one int64 array per field, without `runs`."""
        columns = list(zip(*self.messages, strict=True)) or [()] * len(WeightMessage._fields)
        named = zip(WeightMessage._fields, columns, strict=True)
        return {name: np.array(each, dtype=np.int64) for name, each in named if name != "runs"}

    def of_source(self, source: int) -> list[WeightMessage]:
        return self._by_end[0].get(source, [])

    def of_receiver(self, receiver: int) -> list[WeightMessage]:
        return self._by_end[1].get(receiver, [])


def build_plan(
    specs: Mapping[str, TensorSpec],
    held: Mapping[int, Holding],
    needed: Mapping[int, Holding],
    *,
    neighbours: Neighbours | None = None,
    hosts: Hosts | None = None,
    bucket_bytes: int | None = None,
) -> Plan:
    """Plan a weight sync. Each engine worker (receiver) gets the tensors in the order of `specs`, but each starts at
    another one.

    bucket_bytes: in one bucket (step), each source sends and each receiver receives at most this much to or from other
    hosts, as much within its host, and as much locally; a single row of a tensor may be more. Default: 1/16 of all
    tensors, within 1 to 64 MiB; with more than 8 sources 1/3,072, within 16 to 64 MiB. Larger buckets mean fewer
    messages, but more memory, as each process stages `transports.DEPTH` buckets, and longer waits.
    hosts: of each process, if known; a source on the host of the receiver is preferred.

    Raises:
        WeightSyncError: a receiver needs something that no source holds.
    """
    are_few = len(held) <= _FEW_SOURCES
    if bucket_bytes is None:
        total, least = sum(spec.num_bytes for spec in specs.values()), _LEAST_BUCKET if are_few else _LEAST_OF_MANY
        bucket_bytes = min(max(least, -(-total // (_PART if are_few else _PART_OF_MANY))), _MOST_BUCKET)
    # A plan is millions of small objects without cycles; garbage collection would take half of the planning time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        block_bytes = -(-bucket_bytes // (_BLOCKS if are_few else _BLOCKS_OF_MANY))
        layers = list(assign(specs, held, needed, neighbours or {}, hosts=hosts or {}, block_bytes=block_bytes))
        if are_few and all(len(holding) == len(specs) for holding in held.values()):
            # No source would be idle in any order, so a schedule gains nothing.
            transfers = in_order(layers, list(needed))
        else:
            transfers = scheduled(layers, list(held), list(needed), hosts=hosts or {})
        messages = tuple(_pack(transfers, bucket_bytes, hosts or {}))
        return Plan(specs=specs, needs=needed, messages=messages, hosts=hosts or {}, neighbours=neighbours or {})
    finally:
        # Move the new objects to the oldest generation, as if they had been scanned.
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()


class _Capacity:
    """The bytes that a process may still send or receive over one kind of link in each bucket that is not empty.

    short: for each number of parts of a bucket, the buckets with less room than that, as bits.
    """

    __slots__ = ("left", "short")

    def __init__(self) -> None:
        self.left, self.short = dict[int, int](), [0] * (_PARTS_OF_BUCKET + 1)


def _pack(transfers: Iterable[Transfer], bucket_bytes: int, hosts: Hosts) -> Iterator[WeightMessage]:
    """Pack transfers into messages, one per bucket (step of the sync) and pair of source and receiver.

    A transfer goes into the first bucket with room at both source and receiver, but not before the last bucket of the
    layer that the receiver got two before, because engines hold back a layer until it is complete. Links within a
    device, within a host and between hosts have room of their own: they work at the same time. Every process handles
    its buckets in their order, so there is no deadlock.
    """
    rooms = defaultdict[tuple[bool, int, bool, bool], _Capacity](_Capacity)
    # By receiver: the layer that it gets, and the last bucket of that, of the one before, and of the one before that.
    at = defaultdict[int, tuple[int, int, int, int]](lambda: (-1, 0, 0, 0))
    packed = dict[tuple[int, int, int, bool], list[Block]]()
    for source, receiver, local, layer, block in transfers:
        near, size = hosts.get(source) == hosts.get(receiver), min(block.num_bytes, bucket_bytes)
        out, into = rooms[True, source, near, local], rooms[False, receiver, near, local]
        current, last, before, first = at[receiver]
        if layer != current:
            before, first = last, before
        bucket, parts = first, max(1, size * _PARTS_OF_BUCKET // bucket_bytes)
        short = out.short[parts] | into.short[parts]
        while True:
            # On to the next bucket that is not short.
            ahead = short >> bucket
            bucket += (~ahead & (ahead + 1)).bit_length() - 1
            if size <= min(out.left.get(bucket, bucket_bytes), into.left.get(bucket, bucket_bytes)):
                break
            bucket += 1
        at[receiver] = layer, max(last, bucket), before, first
        for room in (out, into):
            had = room.left.get(bucket, bucket_bytes)
            has = room.left[bucket] = had - size
            for i in range(has * _PARTS_OF_BUCKET // bucket_bytes, had * _PARTS_OF_BUCKET // bucket_bytes):
                room.short[i + 1] |= 1 << bucket
        packed.setdefault((bucket, source, receiver, local), []).append(block)
    turns = Counter[tuple[int, int]]()
    for key in sorted(packed, key=operator.itemgetter(0)):
        bucket, source, receiver, local = key
        runs, num_bytes = packed[key][0]
        if others := packed[key][1:]:
            runs = widest_first([*runs, *itertools.chain.from_iterable(block.runs for block in others)])
            num_bytes += sum(block.num_bytes for block in others)
        yield WeightMessage(bucket, turns[source, receiver], source, receiver, local, runs, num_bytes)
        turns[source, receiver] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatistics:
    """The cost of a weight sync."""

    wire_bytes: int
    local_bytes: int
    num_messages: int
    num_buckets: int
    max_received_bytes: int
    max_sent_bytes: int


def plan_statistics(plan: Plan) -> PlanStatistics:
    """Compute a plan's cost."""
    of = plan.columns
    over_wire = of["local"] == 0
    sent, received = (np.bincount(of[end], of["num_bytes"] * over_wire) for end in ("source", "receiver"))
    return PlanStatistics(
        wire_bytes=int(received.sum()),
        local_bytes=int(of["num_bytes"].sum() - received.sum()),
        num_messages=int(over_wire.sum()),
        num_buckets=len(np.unique(of["bucket"])),
        max_received_bytes=int(received.max(initial=0)),
        max_sent_bytes=int(sent.max(initial=0)),
    )
