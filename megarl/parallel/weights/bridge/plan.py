"""The plan of a transfer: which source sends which box of which tensor to which sink, and in which bucket.

A pure function of what sources hold and sinks need, computed once. Sink i receives

    R_i = |D_i| − |D_i ∩ S_i|

bytes over the wire and no more: D_i is what it needs, S_i what the sources hold that share its memory. The rest of
D_i it copies from these. Where several sources hold a piece, the one that has least to send so far sends it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megarl.errors import WeightSyncError
from megarl.parallel.weights.bridge.boxes import Box, num_elements, pieces, split_rows
from megarl.safetensors_map import TensorSpec

# The most that a process sends or receives at a time; it stages `wires.DEPTH` times as much.
BUCKET_BYTES = 64 << 20
# What a process holds or needs: of each tensor one box.
Holding: TypeAlias = Mapping[str, Box]
# Sink → sources that share its memory.
Neighbours: TypeAlias = Mapping[int, Collection[int]]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor on its way; `offset` is where its bytes start in the message."""

    tensor: str
    box: Box
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a source sends to a sink in one bucket, end to end; the `turn`-th message of the pair.

    local: between neighbours, not over the wire.
    """

    bucket: int
    turn: int
    source: int
    sink: int
    local: bool
    parts: tuple[Part, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All messages, by bucket; `specs` are the full tensors."""

    specs: Mapping[str, TensorSpec]
    needs: Mapping[int, Holding]
    messages: tuple[Message, ...]

    def of_source(self, source: int) -> list[Message]:
        return [message for message in self.messages if message.source == source]

    def of_sink(self, sink: int) -> list[Message]:
        return [message for message in self.messages if message.sink == sink]

    def received_bytes(self, sink: int, *, local: bool = False) -> int:
        """R_i, or with `local` what a sink copies from its neighbours."""
        return sum(message.num_bytes for message in self.of_sink(sink) if message.local == local)

    @property
    def wire_bytes(self) -> int:
        """Σ R_i."""
        return sum(message.num_bytes for message in self.messages if not message.local)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A piece with its way."""

    source: int
    sink: int
    local: bool
    tensor: str
    box: Box
    num_bytes: int


def build_plan(
    specs: Mapping[str, TensorSpec],
    held: Mapping[int, Holding],
    needed: Mapping[int, Holding],
    *,
    neighbours: Neighbours | None = None,
    bucket_bytes: int,
) -> Plan:
    """The plan for tensors in the order of `specs`, by which sinks complete them.

    In one bucket a source sends and a sink receives at most `bucket_bytes` over the wire, and as much again locally,
    unless one row of a tensor is more.

    Raises:
        WeightSyncError: a sink needs what no source holds.
    """
    transfers = _assign(specs, held, needed, neighbours or {})
    split = (part for transfer in transfers for part in _split(transfer, specs[transfer.tensor], bucket_bytes))
    messages = _pack(split, specs, bucket_bytes)
    return Plan(specs=specs, needs=needed, messages=tuple(messages))


def _assign(
    specs: Mapping[str, TensorSpec],
    held: Mapping[int, Holding],
    needed: Mapping[int, Holding],
    neighbours: Neighbours,
) -> Iterator[_Transfer]:
    """Every piece that a sink needs, with the source that it comes from."""
    holders, takers = _by_tensor(held), _by_tensor(needed)
    near = {sink: frozenset(neighbours.get(sink, ())) for sink in needed}
    load = dict.fromkeys(held, 0)
    for name, spec in specs.items():
        boxes = holders.get(name, {})
        groups = list(boxes.values())
        for wanted, sinks in takers.get(name, {}).items():
            for piece in pieces(wanted, tuple(boxes)):
                candidates = [source for holder in piece.holders for source in groups[holder]]
                if not candidates:
                    raise WeightSyncError(f"no rank holds {name}{piece.box}, which engine worker {sinks[0]} needs")
                num_bytes = num_elements(piece.box) * spec.dtype.itemsize
                for sink in sinks:
                    own = [source for source in candidates if source in near[sink]]
                    source = min(own) if own else min(candidates, key=lambda each: (load[each], each))
                    load[source] += 0 if own else num_bytes
                    yield _Transfer(source, sink, bool(own), name, piece.box, num_bytes)


def _by_tensor(holdings: Mapping[int, Holding]) -> dict[str, dict[Box, list[int]]]:
    """Tensor → box → who has it."""
    found: dict[str, dict[Box, list[int]]] = {}
    for process, holding in sorted(holdings.items()):
        for name, box in holding.items():
            found.setdefault(name, {}).setdefault(box, []).append(process)
    return found


def _split(transfer: _Transfer, spec: TensorSpec, max_bytes: int) -> list[_Transfer]:
    if transfer.num_bytes <= max_bytes:
        return [transfer]
    size = spec.dtype.itemsize
    return [
        _Transfer(transfer.source, transfer.sink, transfer.local, transfer.tensor, box, num_elements(box) * size)
        for box in split_rows(transfer.box, max_bytes // size)
    ]


def _pack(transfers: Iterator[_Transfer], specs: Mapping[str, TensorSpec], bucket_bytes: int) -> Iterator[Message]:
    """Transfers in messages: one per pair and bucket. A bucket ends where a process would stage too much in it."""
    filled, turns = dict[tuple[str, int, bool], int](), Counter[tuple[int, int]]()
    bucket, pairs = 0, dict[tuple[int, int], list[_Transfer]]()
    for transfer in transfers:
        ends = (("source", transfer.source, transfer.local), ("sink", transfer.sink, transfer.local))
        if any(0 < filled.get(end, 0) > bucket_bytes - transfer.num_bytes for end in ends):
            yield from (_message(bucket, turns[pair], pairs[pair], specs) for pair in pairs)
            turns.update(pairs.keys())
            bucket, filled, pairs = bucket + 1, {}, {}
        for end in ends:
            filled[end] = filled.get(end, 0) + transfer.num_bytes
        pairs.setdefault((transfer.source, transfer.sink), []).append(transfer)
    yield from (_message(bucket, turns[pair], pairs[pair], specs) for pair in pairs)


def _message(bucket: int, turn: int, transfers: Sequence[_Transfer], specs: Mapping[str, TensorSpec]) -> Message:
    """A pair's transfers in one bucket."""
    parts, offset = [], 0
    # Widest items first: all are aligned without gaps.
    for transfer in sorted(transfers, key=lambda each: -specs[each.tensor].dtype.itemsize):
        parts.append(Part(transfer.tensor, transfer.box, offset))
        offset += transfer.num_bytes
    first = transfers[0]
    return Message(
        bucket=bucket,
        turn=turn,
        source=first.source,
        sink=first.sink,
        local=first.local,
        parts=tuple(parts),
        num_bytes=offset,
    )
