"""Choose which trainer rank sends each part of a tensor that an engine worker needs: one beside it or the least
busy.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from megarl.errors import WeightSyncError
from megarl.weights.boxes import Box, num_elements, pieces
from megarl.weights.safetensors_map import TensorSpec

# What a process holds or needs, as one box per tensor.
Holding: TypeAlias = Mapping[str, Box]
# Sink → sources that share its memory.
Neighbours: TypeAlias = Mapping[int, Collection[int]]
# Box of a tensor → the processes that hold or need it.
_Places: TypeAlias = Mapping[Box, tuple[int, ...]]
_NOWHERE: _Places = {}


class Run(NamedTuple):
    """A box (rectangular part) that several tensors have in common, sent as one sequence of bytes.

    num_bytes: the size of one tensor's box; item_bytes: of one element.
    """

    tensors: tuple[str, ...]
    box: Box
    num_bytes: int
    item_bytes: int


class Transfer(NamedTuple):
    """One run (a box of several tensors) to send from a source rank to a sink worker; local: they share memory."""

    source: int
    sink: int
    local: bool
    run: Run


class Alike(NamedTuple):
    """Successive tensors of one layer, such as its experts on one rank, for which one plan is enough.

    They have the same shape, dtype, holders and receivers. held, needed: box (rectangular part) → processes.
    """

    tensors: tuple[str, ...]
    spec: TensorSpec
    held: _Places
    needed: _Places


def alike_tensors(
    specs: Mapping[str, TensorSpec], held: Mapping[int, Holding], needed: Mapping[int, Holding]
) -> Iterator[Alike]:
    """Group successive tensors that have the same layer, shape, dtype, holders and receivers, in the order of
    `specs`.
    """
    holders, takers = _by_tensor(held), _by_tensor(needed)

    def places(name: str) -> tuple[str, TensorSpec, _Places, _Places]:
        return layer_of(name), specs[name], holders.get(name, _NOWHERE), takers.get(name, _NOWHERE)

    for (_, spec, has, wants), names in itertools.groupby(specs, places):
        yield Alike(tuple(names), spec, has, wants)


def layer_of(name: str) -> str:
    """Return the prefix of a tensor name that names its layer, such as model.layers.3, or "" outside layers."""
    head, layers, rest = name.partition(".layers.")
    return f"{head}{layers}{rest.partition('.')[0]}" if layers else ""


def assign(
    specs: Mapping[str, TensorSpec],
    held: Mapping[int, Holding],
    needed: Mapping[int, Holding],
    neighbours: Neighbours,
) -> Iterator[Transfer]:
    """Choose, for every part of a tensor that an engine worker (sink) needs, the trainer rank (source) that sends it.

    Raises:
        WeightSyncError: a worker needs something that no rank holds.
    """
    near = {sink: sorted(neighbours.get(sink, ())) for sink in needed}
    load = dict.fromkeys(held, 0)
    for alike in alike_tensors(specs, held, needed):
        boxes, groups = tuple(alike.held), list(alike.held.values())
        item_bytes = alike.spec.dtype.itemsize
        for wanted, sinks in alike.needed.items():
            for piece in pieces(wanted, boxes):
                candidates = frozenset(source for holder in piece.holders for source in groups[holder])
                if not candidates:
                    name = alike.tensors[0]
                    raise WeightSyncError(f"no rank holds {name}{piece.box}, which engine worker {sinks[0]} needs")
                run = Run(alike.tensors, piece.box, num_elements(piece.box) * item_bytes, item_bytes)
                for sink in sinks:
                    for own in near[sink]:
                        if own in candidates:
                            yield Transfer(own, sink, True, run)
                            break
                    else:
                        for source, part in _spread(run, candidates, load):
                            yield Transfer(source, sink, False, part)


def _spread(run: Run, candidates: Collection[int], load: dict[int, int]) -> Iterable[tuple[int, Run]]:
    """Divide a run's tensors among ranks that all hold them: each goes to the rank with the fewest bytes in `load`."""
    tensors, _, num_bytes, _ = run
    if len(candidates) == 1:
        (source,) = candidates
        load[source] += len(tensors) * num_bytes
        return ((source, run),)
    heap = [(load[source], source) for source in candidates]
    heapq.heapify(heap)
    counts = Counter[int]()
    for _ in tensors:
        least, source = heap[0]
        counts[source] += 1
        heapq.heapreplace(heap, (least + num_bytes, source))
    shares, start = [], 0
    for source, count in counts.items():
        load[source] += count * num_bytes
        shares.append((source, run._replace(tensors=tensors[start : start + count])))
        start += count
    return shares


def _by_tensor(holdings: Mapping[int, Holding]) -> dict[str, dict[Box, tuple[int, ...]]]:
    """Return tensor → box → the processes that hold (or need) the box. Replicas' shared mappings are read only once."""
    replicas: dict[int, tuple[Holding, list[int]]] = {}
    for process, holding in sorted(holdings.items()):
        replicas.setdefault(id(holding), (holding, []))[1].append(process)
    found: dict[str, dict[Box, tuple[int, ...]]] = {}
    for holding, processes in replicas.values():
        those = tuple(processes)
        for name, box in holding.items():
            places = found.setdefault(name, {})
            places[box] = places.get(box, ()) + those
    return found
