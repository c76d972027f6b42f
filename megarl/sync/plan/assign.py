"""Choose which engine worker shares memory with which trainer rank, so that as few bytes as possible are sent, and
which rank sends each part that a worker needs: one beside it, or the least busy.
"""

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from megarl.errors import WeightSyncError
from megarl.weights.boxes import Box, Boxes, intersection, num_elements, pieces, split_rows
from megarl.weights.safetensors_map import TensorSpec

_ITEM_BYTES = operator.attrgetter("item_bytes")
# The parts of tensors that a process holds or needs.
Holding: TypeAlias = Mapping[str, Boxes]
# Receiver → sources that share its memory.
Neighbours: TypeAlias = Mapping[int, Collection[int]]
# Process → its host; empty: not known, so that all links count as equally fast.
Hosts: TypeAlias = Mapping[int, Hashable]
# Box of a tensor → the processes that hold it, or the numbers of the replicas that need it.
_Places: TypeAlias = Mapping[Box, tuple[int, ...]]


class BoxRun(NamedTuple):
    """A box (rectangular part) that several tensors have in common, sent as one sequence of bytes.

    num_bytes: the size of one tensor's box; item_bytes: of one element.
    """

    tensors: tuple[str, ...]
    box: Box
    num_bytes: int
    item_bytes: int


class Block(NamedTuple):
    """Runs that are sent in one message, those of wide elements first, so that all are aligned without gaps."""

    runs: tuple[BoxRun, ...]
    num_bytes: int


class TensorGroup(NamedTuple):
    """Tensors of one layer, such as its experts on one rank, for which one plan is enough.

    They have the same shape, dtype, holders and receivers. held, needed: box (rectangular part) → processes.
    """

    tensors: tuple[str, ...]
    spec: TensorSpec
    held: _Places
    needed: _Places


class Portion(NamedTuple):
    """Runs of a layer that the same ranks (candidates) could send to a receiver, and their size."""

    candidates: frozenset[int]
    runs: tuple[BoxRun, ...]
    num_bytes: int


# From which sources a receiver gets a layer, and in which blocks.
Shares: TypeAlias = Mapping[int, tuple[Block, ...]]


class Layer(NamedTuple):
    """Parts of a layer that every receiver receives: remote, from each source over the wire; local, from sources
    beside it.

    Tensors between layers, such as embeddings, make up a layer too. size: bytes of its full tensors. holders: all
    sources that hold some of it.
    """

    size: int
    holders: frozenset[int]
    remote: Mapping[int, Shares]
    local: Mapping[int, Shares]


def replicas_of(holdings: Mapping[int, Holding]) -> list[tuple[Holding, tuple[int, ...]]]:
    """Return each different mapping (by identity) among `holdings`, with the processes that share it."""
    found: dict[int, tuple[Holding, list[int]]] = {}
    for process, holding in sorted(holdings.items()):
        found.setdefault(id(holding), (holding, []))[1].append(process)
    return [(holding, tuple(processes)) for holding, processes in found.values()]


def alike_tensors(
    specs: Mapping[str, TensorSpec], held: Mapping[int, Holding], needed: Mapping[int, Holding]
) -> Iterator[tuple[str, list[TensorGroup]]]:
    """Yield each layer's name and its tensors by shape, dtype, holders and receivers, in the order of `specs`."""
    holders, takers = _by_tensor(held), _by_tensor(needed)
    for layer, names in itertools.groupby(specs, layer_of):
        groups = defaultdict[tuple[Hashable, ...], list[str]](list)
        for name in names:
            places = (tuple(by_name.get(name, ())) for by_name in (holders, takers))
            groups[(specs[name], *places) if layer else (name,)].append(name)
        yield (
            layer,
            [
                TensorGroup(
                    tuple(group), specs[group[0]], _places(holders.get(group[0], ())), _places(takers.get(group[0], ()))
                )
                for group in groups.values()
            ],
        )


def _by_tensor(holdings: Mapping[int, Holding]) -> dict[str, list[tuple[Box, tuple[int, ...]]]]:
    """For each tensor, list the boxes (rectangular parts) in `holdings`, each with the processes that hold it."""
    found = defaultdict[str, list[tuple[Box, tuple[int, ...]]]](list)
    for holding, processes in replicas_of(holdings):
        for name, boxes in holding.items():
            found[name] += [(box, processes) for box in boxes]
    return found


def _places(found: Iterable[tuple[Box, tuple[int, ...]]]) -> _Places:
    places = defaultdict[Box, tuple[int, ...]](tuple)
    for box, processes in found:
        places[box] += processes
    return places


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
    hosts: Hosts,
    block_bytes: int,
) -> Iterator[Layer]:
    """Choose, for every part of a tensor that an engine worker (receiver) needs, the trainer rank (source) that sends
    it.

    Among sources that hold it, those are preferred that share the receiver's memory, then those that send to it from
    the same layer anyway, then those of its host; of several, the one with least to send so far. The part of a layer
    that a receiver gets from one source is sent in blocks of at most `block_bytes`, which receivers with the same
    mapping in `needed` share.

    Raises:
        WeightSyncError: a worker needs something that no rank holds.
    """
    replicas, load = replicas_of(needed), dict.fromkeys(held, 0)
    for layer, group in alike_tensors(specs, held, dict(enumerate(holding for holding, _ in replicas))):
        every = _portions(layer, group, [receivers for _, receivers in replicas])
        holders = frozenset[int]().union(*(portion.candidates for portions in every for portion in portions))
        remote, local = dict[int, Shares](), dict[int, Shares]()
        for portions, (_, receivers) in zip(every, replicas, strict=True):
            beside = {receiver: holders.intersection(neighbours.get(receiver, ())) for receiver in receivers}
            # Most receivers get the same portions from a source.
            blocks = functools.cache(
                lambda numbers, of=portions, joins=bool(layer): _blocks(
                    [of[i] for i in numbers], block_bytes, joins=joins
                )
            )
            for receiver, far, near in _choose(portions, beside, load, hosts, joins=bool(layer)):
                remote[receiver] = {source: blocks(numbers) for source, numbers in far.items()}
                if near:
                    local[receiver] = {source: blocks(numbers) for source, numbers in near.items()}
        yield Layer(sum(len(group.tensors) * group.spec.num_bytes for group in group), holders, remote, local)


def _portions(layer: str, group: Iterable[TensorGroup], replicas: Sequence[tuple[int, ...]]) -> list[list[Portion]]:
    """Return what each replica's receivers need of a layer, by the ranks that could send it.

    Outside layers, tensors are apart, so that ranks that hold the same tensors share them evenly.
    """
    found = [defaultdict[tuple[frozenset[int], str], list[BoxRun]](list) for _ in replicas]
    for tensors, spec, held, needed in group:
        boxes, holders, item = tuple(held), list(held.values()), spec.dtype.itemsize
        for wanted, takers in needed.items():
            for piece in pieces(wanted, boxes):
                candidates = frozenset(source for holder in piece.holders for source in holders[holder])
                if not candidates:
                    receiver = replicas[takers[0]][0]
                    raise WeightSyncError(
                        f"no rank holds {tensors[0]}{piece.box}, which engine worker {receiver} needs"
                    )
                run = BoxRun(tensors, piece.box, num_elements(piece.box) * item, item)
                for taker in takers:
                    found[taker][candidates, "" if layer else tensors[0]].append(run)
    every = [
        [
            Portion(key[0], tuple(runs), sum(len(run.tensors) * run.num_bytes for run in runs))
            for key, runs in by.items()
        ]
        for by in found
    ]
    # The largest first: smaller ones go along with them.
    return [sorted(portions, key=lambda each: -each.num_bytes) for portions in every] if layer else every


def _choose(
    portions: Sequence[Portion],
    beside: Mapping[int, frozenset[int]],
    load: dict[int, int],
    hosts: Hosts,
    *,
    joins: bool,
) -> Iterator[tuple[int, dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]]:
    """Yield the receivers of `beside`, and of each which portions it gets (by number) from which sources: over the
    wire, and from those that share its memory.

    joins: whether sources that send to a receiver anyway are preferred.
    """
    alone, shared = dict[int, tuple[int, ...]](), list[int]()
    for i, (candidates, _, num_bytes) in enumerate(portions):
        if len(candidates) > 1:
            shared.append(i)
            continue
        (source,) = candidates
        alone[source] = (*alone.get(source, ()), i)
        load[source] += num_bytes * sum(source not in sources for sources in beside.values())
    for receiver, sources in beside.items():
        far, near = alone.copy(), dict[int, tuple[int, ...]]()
        for source in sources.intersection(alone):
            near[source] = far.pop(source)
        for i in shared:
            candidates, _, num_bytes = portions[i]
            if at_hand := sources & candidates:
                source, taken = min(at_hand), near
            else:
                able: Collection[int] = [source for source in far if source in candidates] if joins else ()
                able = (
                    able
                    or [source for source in candidates if hosts and hosts[source] == hosts[receiver]]
                    or candidates
                )
                source, taken = min(able, key=lambda each: (load[each], each)), far
                load[source] += num_bytes
            taken[source] = (*taken.get(source, ()), i)
        yield receiver, far, near


def _blocks(portions: Iterable[Portion], max_bytes: int, *, joins: bool) -> tuple[Block, ...]:
    """Lay portions in blocks of at most `max_bytes`; longer runs are split into fewer tensors, or rows of one.

    joins: whether portions are laid end to end; else each has blocks of its own, so that those of several sources may
    share a bucket.
    """
    apart, blocks = [portion.runs for portion in portions], list[Block]()
    for runs in [itertools.chain.from_iterable(apart)] if joins else apart:
        taken, filled = list[BoxRun](), 0
        for run in itertools.chain.from_iterable(_split(run, max_bytes) for run in runs):
            size = len(run.tensors) * run.num_bytes
            if taken and filled + size > max_bytes:
                blocks.append(Block(widest_first(taken), filled))
                taken, filled = [], 0
            taken.append(run)
            filled += size
        blocks.append(Block(widest_first(taken), filled))
    return tuple(blocks)


def widest_first(runs: Iterable[BoxRun]) -> tuple[BoxRun, ...]:
    """Order the runs of a message so that all are aligned without gaps."""
    return tuple(sorted(runs, key=_ITEM_BYTES, reverse=True))


def _split(run: BoxRun, max_bytes: int) -> Iterable[BoxRun]:
    tensors, box, num_bytes, item_bytes = run
    if len(tensors) * num_bytes <= max_bytes:
        return (run,)
    if num_bytes <= max_bytes:
        most = max_bytes // num_bytes
        return [run._replace(tensors=tensors[i : i + most]) for i in range(0, len(tensors), most)]
    return [
        BoxRun((tensor,), rows, num_elements(rows) * item_bytes, item_bytes)
        for tensor in tensors
        for rows in split_rows(box, max_bytes // item_bytes)
    ]


def overlaps(specs: Mapping[str, TensorSpec], held: Mapping[int, Holding], needed: Mapping[int, Holding]) -> np.ndarray:
    """Compute |D_i ∩ S_j|, the bytes that worker i needs and rank j holds: [workers, ranks] int64, in key order."""
    replicas, columns = replicas_of(needed), {source: j for j, source in enumerate(held)}
    # For each different holding of workers: bytes by rank. Additions to single elements of arrays would be slow.
    rows = [[0] * len(columns) for _ in replicas]
    alike_needs = dict(enumerate(holding for holding, _ in replicas))
    for alike in itertools.chain.from_iterable(group for _, group in alike_tensors(specs, held, alike_needs)):
        for (wanted, takers), (has, holders) in itertools.product(alike.needed.items(), alike.held.items()):
            if (common := intersection(wanted, has)) is not None:
                num_bytes = len(alike.tensors) * num_elements(common) * alike.spec.dtype.itemsize
                for taker, source in itertools.product(takers, holders):
                    rows[taker][columns[source]] += num_bytes
    by_receiver = {receiver: row for row, (_, receivers) in zip(rows, replicas, strict=True) for receiver in receivers}
    return np.array([by_receiver[receiver] for receiver in needed], dtype=np.int64).reshape(len(needed), len(columns))


def best_neighbours(shared: np.ndarray) -> list[int]:
    """Choose a different trainer rank σ(i) to put beside each engine worker i, so that Σ_i |D_i ∩ S_σ(i)| is largest.

    shared: |D_i ∩ S_j| [workers, ranks] from `overlaps`, or rows and columns of it, such as for one engine.

    Raises:
        ValueError: there are more workers than ranks.
    """
    if shared.shape[0] > shared.shape[1]:
        raise ValueError(
            f"got {shared.shape[0]} receivers and {shared.shape[1]} sources, expected at most as many receivers"
        )
    return assignment(-shared)


def assignment(costs: np.ndarray) -> list[int]:
    """Choose each row of [n, m] int64 its own column, n ≤ m, at least total cost (Hungarian method, O(n² m))."""
    num_rows, num_columns = costs.shape
    # Column 0 and row 0 are outside the matrix; paths begin there.
    row_price, column_price = np.zeros(num_rows + 1, dtype=np.int64), np.zeros(num_columns + 1, dtype=np.int64)
    row_of = np.zeros(num_columns + 1, dtype=np.int64)
    for row in range(1, num_rows + 1):
        row_of[0], column = row, 0
        least = np.full(num_columns + 1, np.iinfo(np.int64).max)
        before, seen = np.zeros(num_columns + 1, dtype=np.int64), np.zeros(num_columns + 1, dtype=bool)
        while row_of[column]:
            seen[column], at = True, row_of[column]
            reduced = costs[at - 1] - row_price[at] - column_price[1:]
            nearer = ~seen[1:] & (reduced < least[1:])
            least[1:][nearer], before[1:][nearer] = reduced[nearer], column
            open_columns = np.flatnonzero(~seen)
            column = open_columns[np.argmin(least[open_columns])]
            step = least[column]
            row_price[row_of[seen]] += step
            column_price[seen] -= step
            least[~seen] -= step
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    chosen = np.zeros(num_rows, dtype=np.int64)
    taken = np.flatnonzero(row_of[1:])
    chosen[row_of[1:][taken] - 1] = taken
    return [int(column) for column in chosen]
