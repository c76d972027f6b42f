"""Plan a weight sync: which trainer rank (source) sends which box (part of a tensor) to which engine worker (sink).

The plan is a pure function of what sources hold and sinks need, computed once. Sink i receives only

    R_i = |D_i| − |D_i ∩ S_i|

bytes over the wire (network or host memory). D_i is what it needs, and S_i what the sources that share its memory hold;
it copies D_i ∩ S_i from them. If several sources hold a part, the one with least to send so far sends it.
"""

import functools
import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megarl.sync.plan.assign import Holding, Neighbours, Run, assign, replicas_of, widest_first
from megarl.sync.plan.schedule import Hosts, Transfer, in_order, scheduled
from megarl.weights.boxes import Box, num_elements
from megarl.weights.safetensors_map import TensorSpec

_LEAST_BUCKET, _MOST_BUCKET = 1 << 20, 128 << 20
# With more than so many sources, a bucket is at most this part of what a sink needs, but not less than 16 MiB: with
# small ones many processes wait less for each other.
_FEW_SOURCES, _NUM_BUCKETS, _LEAST_OF_MANY = 8, 1536, 16 << 20


@dataclass(frozen=True, slots=True)
class Fragment:
    """A box (rectangular part) of a tensor within a message, whose bytes start at `offset` in the message."""

    tensor: str
    box: Box
    offset: int


class Parcel(NamedTuple):
    """One message from a trainer rank (source) to an engine worker (sink); `turn` numbers the messages of this pair.

    bucket: the step of the sync in which it is sent. local: whether source and sink share memory, so no wire is needed.
    """

    bucket: int
    turn: int
    source: int
    sink: int
    local: bool
    runs: tuple[Run, ...]
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
    """The plan of a weight sync: all messages, ordered by bucket (step), with `specs` of the full tensors and `needs`,
    the box of each tensor per sink.
    """

    specs: Mapping[str, TensorSpec]
    needs: Mapping[int, Holding]
    messages: tuple[Parcel, ...]

    @functools.cached_property
    def _by_end(self) -> tuple[Mapping[int, list[Parcel]], Mapping[int, list[Parcel]]]:
        sent, received = dict[int, list[Parcel]](), dict[int, list[Parcel]]()
        for message in self.messages:
            sent.setdefault(message.source, []).append(message)
            received.setdefault(message.sink, []).append(message)
        return sent, received

    def of_source(self, source: int) -> list[Parcel]:
        return self._by_end[0].get(source, [])

    def of_sink(self, sink: int) -> list[Parcel]:
        return self._by_end[1].get(sink, [])

    def received_bytes(self, sink: int, *, local: bool = False) -> int:
        """Return how many bytes a sink receives: over the wire, or with `local` from ranks that share its memory."""
        return sum(message.num_bytes for message in self.of_sink(sink) if message.local == local)

    @property
    def wire_bytes(self) -> int:
        """Return the bytes sent over the wire to all engine workers: Σ R_i."""
        return sum(message.num_bytes for message in self.messages if not message.local)


def build_plan(
    specs: Mapping[str, TensorSpec],
    held: Mapping[int, Holding],
    needed: Mapping[int, Holding],
    *,
    neighbours: Neighbours | None = None,
    hosts: Hosts | None = None,
    bucket_bytes: int | None = None,
) -> Plan:
    """Plan a weight sync. Each engine worker (sink) gets the tensors in the order of `specs`, but each starts at
    another one.

    bucket_bytes: in one bucket (step), each source sends and each sink receives at most this much over the wire, and as
    much locally; a single row of a tensor may be more. Default: 1/16 of all tensors, within 1 to 128 MiB;
    with more than 8 sources less, so that a sink has about 1,500. Larger buckets mean fewer messages, but more memory,
    as each process stages `wires.DEPTH` buckets, and longer waits.
    hosts: of each process, if known; a source on the host of the sink is preferred.

    Raises:
        WeightSyncError: a sink needs something that no source holds.
    """
    if bucket_bytes is None:
        bucket_bytes = min(max(_LEAST_BUCKET, -(-sum(spec.num_bytes for spec in specs.values()) // 16)), _MOST_BUCKET)
        if len(held) > _FEW_SOURCES:
            largest = max((_num_bytes(specs, holding) for holding, _ in replicas_of(needed)), default=0)
            bucket_bytes = min(bucket_bytes, max(_LEAST_OF_MANY, largest // _NUM_BUCKETS))
    # A plan is millions of small objects without cycles; garbage collection would take half of the planning time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        layers = list(assign(specs, held, needed, neighbours or {}, hosts=hosts or {}, block_bytes=bucket_bytes))
        if len(held) <= _FEW_SOURCES and all(len(holding) == len(specs) for holding in held.values()):
            # No source would be idle in any order, so a schedule gains nothing.
            transfers = in_order(layers, list(needed))
        else:
            transfers = scheduled(layers, list(held), list(needed), hosts=hosts or {}, block_bytes=bucket_bytes)
        return Plan(specs=specs, needs=needed, messages=tuple(_pack(transfers, bucket_bytes)))
    finally:
        # Move the new objects to the oldest generation, as if they had been scanned.
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()


def _num_bytes(specs: Mapping[str, TensorSpec], holding: Holding) -> int:
    return sum(num_elements(box) * specs[name].dtype.itemsize for name, box in holding.items() if name in specs)


def _pack(transfers: Iterable[Transfer], bucket_bytes: int) -> Iterator[Parcel]:
    """Pack transfers into messages, one per bucket (step of the sync) and pair of source and sink.

    A transfer goes into the first bucket with room at both source and sink, but not before the last bucket that either
    has used, nor, if it is local, before what the sink last got over the wire. Every process thus handles its buckets
    in the order of its transfers, so there is no deadlock.
    """
    # Locally or over the wire, for every source and every sink: its current bucket, and the bytes in it.
    at = {local: [defaultdict[int, list[int]](lambda: [0, 0]) for _ in range(2)] for local in (False, True)}
    turns = defaultdict[tuple[int, int, bool], int](int)
    buckets = defaultdict[int, dict[tuple[int, int, bool], Parcel]](dict)
    for source, sink, local, (runs, size) in transfers:
        sources, sinks = at[local]
        out, into, pair = sources[source], sinks[sink], (source, sink, local)
        # Take the later bucket of the two; if they are at the same one, the larger fill.
        bucket, filled = max(out, into)
        if filled and filled + size > bucket_bytes:
            bucket += 1
        if local:
            bucket = max(bucket, at[False][1][sink][0])
        out[:] = bucket, size + (out[1] if out[0] == bucket else 0)
        into[:] = bucket, size + (into[1] if into[0] == bucket else 0)
        messages = buckets[bucket]
        if (begun := messages.get(pair)) is not None:
            merged = widest_first([*begun.runs, *runs])
            messages[pair] = begun._replace(runs=merged, num_bytes=begun.num_bytes + size)
        else:
            messages[pair] = Parcel(bucket, turns[pair], source, sink, local, runs, size)
            turns[pair] += 1
    for bucket in sorted(buckets):
        yield from buckets[bucket].values()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatistics:
    """The cost of a weight sync. staging_bytes: the largest amount that a process buffers at a time, summed over
    processes.
    """

    wire_bytes: int
    local_bytes: int
    num_messages: int
    num_buckets: int
    max_received_bytes: int
    max_sent_bytes: int
    staging_bytes: int


def plan_statistics(plan: Plan, *, depth: int) -> PlanStatistics:
    """Compute a plan's cost if processes stage up to `depth` buckets (steps of the sync) at a time."""
    wire = [message for message in plan.messages if not message.local]
    received, sent = defaultdict[int, int](int), defaultdict[int, int](int)
    for message in wire:
        received[message.sink] += message.num_bytes
        sent[message.source] += message.num_bytes
    sources = {message.source for message in plan.messages}
    sinks = {message.sink for message in plan.messages}
    staged = [_staged(plan.of_source(i), depth) for i in sources] + [_staged(plan.of_sink(i), depth) for i in sinks]
    return PlanStatistics(
        wire_bytes=plan.wire_bytes,
        local_bytes=sum(message.num_bytes for message in plan.messages) - plan.wire_bytes,
        num_messages=len(wire),
        num_buckets=len({message.bucket for message in plan.messages}),
        max_received_bytes=max(received.values(), default=0),
        max_sent_bytes=max(sent.values(), default=0),
        staging_bytes=sum(staged),
    )


def _staged(messages: Iterable[Parcel], depth: int) -> int:
    """Return the largest total size of messages in any `depth` successive buckets, which a process must stage."""
    by_bucket = defaultdict[int, int](int)
    for message in messages:
        by_bucket[message.bucket] += message.num_bytes
    return max((sum(by_bucket.get(first + i, 0) for i in range(depth)) for first in list(by_bucket)), default=0)
