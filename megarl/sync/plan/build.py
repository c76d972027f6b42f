"""Plan a weight sync: which trainer rank (source) sends which box (part of a tensor) to which engine worker (sink).

The plan is a pure function of what sources hold and sinks need, computed once. Sink i receives only

    R_i = |D_i| − |D_i ∩ S_i|

bytes over the wire (network or host memory). D_i is what it needs, and S_i what the sources that share its memory hold;
it copies D_i ∩ S_i from them. If several sources hold a part, the one with least to send so far sends it.
"""

import functools
import gc
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megarl.sync.plan.assign import Holding, Neighbours, Run, Transfer, assign
from megarl.sync.plan.stagger import staggered
from megarl.weights.boxes import Box, num_elements, split_rows
from megarl.weights.safetensors_map import TensorSpec

_ITEM_BYTES = operator.attrgetter("item_bytes")
_LEAST_BUCKET, _MOST_BUCKET = 1 << 20, 128 << 20


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
    bucket_bytes: int | None = None,
) -> Plan:
    """Plan a weight sync. Each engine worker (sink) gets the tensors in the order of `specs`, but each starts at
    another one.

    bucket_bytes: in one bucket (step), each source sends and each sink receives at most this much over the wire, and as
    much locally; a single row of a tensor may be more. Default: 1/16 of all tensors, within 1 to 128 MiB. Larger
    buckets mean fewer messages, but more memory, as each process stages `wires.DEPTH` buckets.

    Raises:
        WeightSyncError: a sink needs something that no source holds.
    """
    if bucket_bytes is None:
        bucket_bytes = min(max(_LEAST_BUCKET, -(-sum(spec.num_bytes for spec in specs.values()) // 16)), _MOST_BUCKET)
    # A plan is millions of small objects without cycles; garbage collection would take half of the planning time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        transfers = staggered(assign(specs, held, needed, neighbours or {}), specs, held, needed)
        return Plan(specs=specs, needs=needed, messages=tuple(_pack(transfers, bucket_bytes)))
    finally:
        # Move the new objects to the oldest generation, as if they had been scanned.
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()


def _blocks(run: Run, max_bytes: int) -> Iterable[Run]:
    """Split a run (one box of several tensors) into runs of at most `max_bytes`: fewer tensors, or fewer rows of
    one.
    """
    tensors, box, num_bytes, item_bytes = run
    if len(tensors) * num_bytes <= max_bytes:
        return (run,)
    if num_bytes <= max_bytes:
        most = max_bytes // num_bytes
        return [run._replace(tensors=tensors[i : i + most]) for i in range(0, len(tensors), most)]
    return [
        Run((tensor,), rows, num_elements(rows) * item_bytes, item_bytes)
        for tensor in tensors
        for rows in split_rows(box, max_bytes // item_bytes)
    ]


class _Open:
    """The message of a (source, sink) pair to which `_pack` is still adding runs."""

    __slots__ = ("bucket", "num_bytes", "runs", "turn")

    def __init__(self) -> None:
        self.bucket, self.turn, self.runs, self.num_bytes = 0, 0, list[Run](), 0

    def begin(self, bucket: int) -> None:
        self.bucket, self.turn, self.runs, self.num_bytes = bucket, self.turn + 1, [], 0


def _pack(transfers: Iterable[Transfer], bucket_bytes: int) -> list[Parcel]:
    """Pack transfers into messages, one per bucket (step of the sync) and pair of source and sink.

    A transfer goes into the first bucket with room at both source and sink, but not before the last bucket that either
    has used. Every process thus handles its buckets in the order of its transfers, so there is no deadlock.
    """
    # For every source and every sink, over the wire and locally: its current bucket, and the bytes in it.
    at = {local: [defaultdict[int, list[int]](lambda: [0, 0]) for _ in range(2)] for local in (False, True)}
    growing = defaultdict[tuple[int, int, bool], _Open](_Open)
    buckets = defaultdict[int, list[Parcel]](list)
    for source, sink, local, whole in transfers:
        sources, sinks = at[local]
        out, into, message = sources[source], sinks[sink], growing[source, sink, local]
        for run in _blocks(whole, bucket_bytes):
            size = len(run.tensors) * run.num_bytes
            # Take the later bucket of the two; if they are at the same one, the larger fill.
            bucket, filled = max(out, into)
            if filled and filled + size > bucket_bytes:
                bucket += 1
            out[:] = bucket, size + (out[1] if out[0] == bucket else 0)
            into[:] = bucket, size + (into[1] if into[0] == bucket else 0)
            if message.bucket != bucket and message.runs:
                buckets[message.bucket].append(_message(source, sink, message, local=local))
                message.begin(bucket)
            message.bucket = bucket
            message.runs.append(run)
            message.num_bytes += size
    for (source, sink, local), message in growing.items():
        buckets[message.bucket].append(_message(source, sink, message, local=local))
    return [message for bucket in sorted(buckets) for message in buckets[bucket]]


def _message(source: int, sink: int, grown: _Open, *, local: bool) -> Parcel:
    if len(grown.runs) > 1:
        # Widest items first: all are aligned without gaps.
        grown.runs.sort(key=_ITEM_BYTES, reverse=True)
    return Parcel(grown.bucket, grown.turn, source, sink, local, tuple(grown.runs), grown.num_bytes)


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
