"""Choose which trainer rank sends each part of a tensor that an engine worker needs: one beside it or the least
busy.
"""

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from megarl.errors import WeightSyncError
from megarl.weights.boxes import Box, num_elements, pieces, split_rows
from megarl.weights.safetensors_map import TensorSpec

_ITEM_BYTES = operator.attrgetter("item_bytes")
# What a process holds or needs, as one box per tensor.
Holding: TypeAlias = Mapping[str, Box]
# Sink → sources that share its memory.
Neighbours: TypeAlias = Mapping[int, Collection[int]]
# Box of a tensor → the processes that hold it, or the numbers of the replicas that need it.
_Places: TypeAlias = Mapping[Box, tuple[int, ...]]


class Run(NamedTuple):
    """A box (rectangular part) that several tensors have in common, sent as one sequence of bytes.

    num_bytes: the size of one tensor's box; item_bytes: of one element.
    """

    tensors: tuple[str, ...]
    box: Box
    num_bytes: int
    item_bytes: int


class Block(NamedTuple):
    """Runs that are sent together: at most `block_bytes`, or a single row of a tensor that is longer."""

    runs: tuple[Run, ...]
    num_bytes: int


class Alike(NamedTuple):
    """Tensors of one layer, such as its experts on one rank, for which one plan is enough.

    They have the same shape, dtype, holders and receivers. held, needed: box (rectangular part) → processes.
    """

    tensors: tuple[str, ...]
    spec: TensorSpec
    held: _Places
    needed: _Places


class Layer(NamedTuple):
    """What every sink receives of a layer: wire, from each source over the wire; local, from sources beside it.

    Tensors between layers, such as embeddings, make up a layer too. size: bytes of its full tensors. holders: all
    sources that hold some of it.
    """

    size: int
    holders: frozenset[int]
    wire: Mapping[int, Mapping[int, tuple[Block, ...]]]
    local: Mapping[int, Sequence[tuple[int, tuple[Block, ...]]]]


def widest_first(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Order runs of one message so that all are aligned without gaps."""
    return tuple(sorted(runs, key=_ITEM_BYTES, reverse=True))


def replicas_of(holdings: Mapping[int, Holding]) -> list[tuple[Holding, tuple[int, ...]]]:
    """Return each different mapping (by identity) among `holdings`, with the processes that share it."""
    found: dict[int, tuple[Holding, list[int]]] = {}
    for process, holding in sorted(holdings.items()):
        found.setdefault(id(holding), (holding, []))[1].append(process)
    return [(holding, tuple(processes)) for holding, processes in found.values()]


def alike_tensors(
    specs: Mapping[str, TensorSpec], held: Mapping[int, Holding], needed: Mapping[int, Holding]
) -> Iterator[tuple[str, list[Alike]]]:
    """Yield each layer's name and its tensors, grouped by shape, dtype, holders and receivers, in the order of
    `specs`.
    """
    holders, takers = _by_tensor(held), _by_tensor(needed)
    for layer, names in itertools.groupby(specs, layer_of):
        groups = defaultdict[tuple[Hashable, ...], list[str]](list)
        for name in names:
            key = (specs[name], *(tuple(by_name.get(name, {}).items()) for by_name in (holders, takers)))
            groups[key if layer else (name,)].append(name)
        yield (
            layer,
            [
                Alike(tuple(group), specs[group[0]], holders.get(group[0], {}), takers.get(group[0], {}))
                for group in groups.values()
            ],
        )


def layer_of(name: str) -> str:
    """Return the prefix of a tensor name that names its layer, such as model.layers.3, or "" outside layers."""
    head, layers, rest = name.partition(".layers.")
    return f"{head}{layers}{rest.partition('.')[0]}" if layers else ""


def assign(
    specs: Mapping[str, TensorSpec],
    held: Mapping[int, Holding],
    needed: Mapping[int, Holding],
    neighbours: Neighbours,
    *,
    hosts: Mapping[int, Hashable],
    block_bytes: int,
) -> Iterator[Layer]:
    """Choose, for every part of a tensor that an engine worker (sink) needs, the trainer rank (source) that sends it.

    Among sources that hold it, those are preferred that share the sink's memory, then those that send to it from the
    same layer anyway, then those of its host; of several, the one with least to send so far. What a sink gets from one
    source of one layer is sent in blocks of at most `block_bytes`, which sinks with the same mapping in `needed`
    share.

    Raises:
        WeightSyncError: a worker needs something that no rank holds.
    """
    replicas, load = replicas_of(needed), dict.fromkeys(held, 0)
    for layer, group in alike_tensors(specs, held, dict(enumerate(holding for holding, _ in replicas))):
        wire = {sink: dict[int, tuple[Block, ...]]() for sink in needed}
        local = defaultdict[int, list[tuple[int, tuple[Block, ...]]]](list)
        holders = set[int]()
        for replica, candidates, runs in _portions(layer, group, [sinks for _, sinks in replicas]):
            holders |= candidates
            blocks, everyone = tuple(_blocks(runs, block_bytes)), sorted(candidates)
            size = sum(block.num_bytes for block in blocks)
            here = defaultdict[Hashable, list[int]](list)
            for source in everyone if hosts else ():
                here[hosts[source]].append(source)
            for sink in replicas[replica][1]:
                if beside := candidates.intersection(neighbours.get(sink, ())):
                    local[sink].append((min(beside), blocks))
                    continue
                shares = wire[sink]
                already = sorted(candidates & shares.keys()) if layer else ()
                able = already or (here.get(hosts[sink]) if hosts else None) or everyone
                source = able[0] if len(able) == 1 else min(able, key=load.__getitem__)
                load[source] += size
                shares[source] = shares[source] + blocks if source in shares else blocks
        size = sum(specs[name].num_bytes for alike in group for name in alike.tensors)
        yield Layer(size, frozenset(holders), wire, local)


def _portions(
    layer: str, group: Iterable[Alike], replicas: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, frozenset[int], list[Run]]]:
    """Yield what each replica's sinks need of a layer, by the ranks that could send it: (replica, ranks, runs).

    Outside layers, tensors are apart, so that ranks that hold the same tensors share them evenly.
    """
    found = defaultdict[tuple[int, frozenset[int], str], list[Run]](list)
    for tensors, spec, held, needed in group:
        boxes, holders = tuple(held), list(held.values())
        for wanted, takers in needed.items():
            for piece in pieces(wanted, boxes):
                candidates = frozenset(source for holder in piece.holders for source in holders[holder])
                if not candidates:
                    sink = replicas[takers[0]][0]
                    raise WeightSyncError(f"no rank holds {tensors[0]}{piece.box}, which engine worker {sink} needs")
                item = spec.dtype.itemsize
                run = Run(tensors, piece.box, num_elements(piece.box) * item, item)
                for replica in takers:
                    found[replica, candidates, "" if layer else tensors[0]].append(run)
    # The largest first: smaller ones go along with them.
    sizes = {key: sum(len(run.tensors) * run.num_bytes for run in runs) for key, runs in found.items()}
    for key in sorted(found, key=sizes.__getitem__, reverse=True) if layer else found:
        yield key[0], key[1], found[key]


def _blocks(runs: Iterable[Run], max_bytes: int) -> Iterator[Block]:
    """Lay runs end to end in blocks of at most `max_bytes`; longer runs are split into fewer tensors, or rows of
    one.
    """
    taken, filled = list[Run](), 0
    for run in itertools.chain.from_iterable(_split(run, max_bytes) for run in runs):
        size = len(run.tensors) * run.num_bytes
        if taken and filled + size > max_bytes:
            yield Block(widest_first(taken), filled)
            taken, filled = [], 0
        taken.append(run)
        filled += size
    if taken:
        yield Block(widest_first(taken), filled)


def _split(run: Run, max_bytes: int) -> Iterable[Run]:
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


def _by_tensor(holdings: Mapping[int, Holding]) -> dict[str, dict[Box, tuple[int, ...]]]:
    """Return tensor → box → the processes that hold (or need) the box. Shared mappings are read only once."""
    found: dict[str, dict[Box, tuple[int, ...]]] = {}
    for holding, processes in replicas_of(holdings):
        for name, box in holding.items():
            places = found.setdefault(name, {})
            places[box] = places.get(box, ()) + processes
    return found
