"""Plan a weight sync: which trainer rank (source) sends which box (part of a tensor) to which engine worker (sink).

The plan is a pure function of what sources hold and sinks need, computed once. Sink i receives only

    R_i = |D_i| − |D_i ∩ S_i|

bytes over the wire (network or host memory). D_i is what it needs, and S_i what the sources that share its memory hold;
it copies D_i ∩ S_i from them. If several sources hold a part, the one with least to send so far sends it.
"""

import functools
import gc
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megarl.sync.plan.assign import BoxRun, Holding, Hosts, Neighbours, assign, widest_first
from megarl.sync.plan.schedule import Transfer, in_order, scheduled
from megarl.weights.boxes import Box
from megarl.weights.safetensors_map import TensorSpec

# The part of a model that a bucket takes, and the bounds of a bucket. With more sources, buckets are smaller: many
# processes then wait less for each other.
_FEW_SOURCES, _PART, _PART_OF_MANY = 8, 16, 3072
_LEAST_BUCKET, _LEAST_OF_MANY, _MOST_BUCKET = 1 << 20, 16 << 20, 128 << 20


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
    much locally; a single row of a tensor may be more. Default: 1/16 of all tensors, within 1 to 128 MiB; with more
    than 8 sources 1/3,072, within 16 to 128 MiB. Larger buckets mean fewer messages, but more memory, as each process
    stages `wires.DEPTH` buckets, and longer waits.
    hosts: of each process, if known; a source on the host of the sink is preferred.

    Raises:
        WeightSyncError: a sink needs something that no source holds.
    """
    are_few = len(held) <= _FEW_SOURCES
    if bucket_bytes is None:
        total, least = sum(spec.num_bytes for spec in specs.values()), _LEAST_BUCKET if are_few else _LEAST_OF_MANY
        bucket_bytes = min(max(least, -(-total // (_PART if are_few else _PART_OF_MANY))), _MOST_BUCKET)
    # A plan is millions of small objects without cycles; garbage collection would take half of the planning time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        layers = list(assign(specs, held, needed, neighbours or {}, hosts=hosts or {}, block_bytes=bucket_bytes))
        if are_few and all(len(holding) == len(specs) for holding in held.values()):
            # No source would be idle in any order, so a schedule gains nothing.
            transfers = in_order(layers, list(needed))
        else:
            transfers = scheduled(layers, list(held), list(needed), hosts=hosts or {})
        return Plan(specs=specs, needs=needed, messages=tuple(_pack(transfers, bucket_bytes)))
    finally:
        # Move the new objects to the oldest generation, as if they had been scanned.
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()


def _pack(transfers: Iterable[Transfer], bucket_bytes: int) -> list[Parcel]:
    """Pack transfers into messages, one per bucket (step of the sync) and pair of source and sink.

    A transfer goes into the first bucket with room at both source and sink, but not before the last bucket that either
    has used, nor, if it is local, before what the sink last got over the wire. Every process thus handles its buckets
    in the order of its transfers, so there is no deadlock.
    """
    # Locally or over the wire, for every source and every sink: its current bucket, and the bytes in it.
    at = {local: [defaultdict[int, list[int]](lambda: [0, 0]) for _ in range(2)] for local in (False, True)}
    last, buckets = dict[tuple[int, int, bool], Parcel](), defaultdict[int, list[Parcel]](list)
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
        messages, begun = buckets[bucket], last.get(pair)
        if begun is not None and begun.bucket == bucket:
            merged = widest_first([*begun.runs, *runs])
            last[pair] = begun._replace(runs=merged, num_bytes=begun.num_bytes + size)
            messages[messages.index(begun)] = last[pair]
        else:
            turn = 0 if begun is None else begun.turn + 1
            last[pair] = message = Parcel(bucket, turn, source, sink, local, runs, size)
            messages.append(message)
    return [message for bucket in sorted(buckets) for message in buckets[bucket]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatistics:
    """The cost of a weight sync. staging_bytes: the most that processes buffer at a time, summed over them."""

    wire_bytes: int
    local_bytes: int
    num_messages: int
    num_buckets: int
    max_received_bytes: int
    max_sent_bytes: int
    staging_bytes: int


def plan_statistics(plan: Plan, *, depth: int) -> PlanStatistics:
    """Compute a plan's cost if processes stage up to `depth` buckets (steps of the sync) at a time."""
    columns = list(zip(*plan.messages, strict=True)) or [()] * len(Parcel._fields)
    of = {
        name: np.array(each, dtype=np.int64)
        for name, each in zip(Parcel._fields, columns, strict=True)
        if name != "runs"
    }
    over_wire = of["local"] == 0
    sent, received = (np.bincount(of[end], of["num_bytes"] * over_wire) for end in ("source", "sink"))
    return PlanStatistics(
        wire_bytes=int(received.sum()),
        local_bytes=int(of["num_bytes"].sum() - received.sum()),
        num_messages=int(over_wire.sum()),
        num_buckets=len(np.unique(of["bucket"])),
        max_received_bytes=int(received.max(initial=0)),
        max_sent_bytes=int(sent.max(initial=0)),
        staging_bytes=sum(_staged(of[end], of["bucket"], of["num_bytes"], depth) for end in ("source", "sink")),
    )


def _staged(process: np.ndarray, bucket: np.ndarray, num_bytes: np.ndarray, depth: int) -> int:
    """Return the largest total size of messages in any `depth` successive buckets, summed over processes."""
    width = bucket.max(initial=0) + depth
    totals = np.bincount(process * width + bucket, num_bytes, minlength=(process.max(initial=0) + 1) * width)
    staged = np.lib.stride_tricks.sliding_window_view(totals.reshape(-1, width), depth, axis=1).sum(axis=2)
    return int(staged.max(axis=1).sum())
