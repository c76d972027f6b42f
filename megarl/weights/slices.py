"""Which part of which Hugging Face tensor a rank's parameter shard is.

`shard_slices` is the only place that knows how Megatron lays shards out. Loading copies into the local views,
export and sync copy out of them, checksums read them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from megarl.weights.families import Dims, ModelSpec, PlacedRule
from megarl.weights.tables import Partition

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """`view`, a view of a local shard (any shape), holds `tensor[index]` of the full Hugging Face tensor."""

    tensor: str
    index: Index
    view: torch.Tensor
    owned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPosition:
    """A rank's place: in its tensor-parallel group, and among the replicas that hold the same shard.

    Of experts the groups are those of expert parallelism: experts are split over `ep_size` ranks in blocks.
    """

    tp_rank: int
    tp_size: int
    replica: int
    num_replicas: int
    ep_rank: int = 0
    ep_size: int = 1

    def local_experts(self, num_experts: int) -> range:
        """The experts of a layer that this rank holds, by their numbers in the whole model."""
        count = num_experts // self.ep_size
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


_Parts = Iterable[tuple[int, Index, torch.Tensor]]
_Partitioner = Callable[[torch.Tensor, Dims, ShardPosition], _Parts]


def _block(rank: int, size: int) -> slice:
    return slice(rank * size, (rank + 1) * size)


def _replicated(shard: torch.Tensor, dims: Dims, at: ShardPosition) -> _Parts:
    yield 0, (slice(0, shard.shape[0]),), shard


def _vocab(shard: torch.Tensor, dims: Dims, at: ShardPosition) -> _Parts:
    start = at.tp_rank * shard.shape[0]
    count = max(0, min(shard.shape[0], dims.vocab - start))
    if count:
        yield 0, (slice(start, start + count),), shard[:count]


def _rows(shard: torch.Tensor, dims: Dims, at: ShardPosition) -> _Parts:
    yield 0, (_block(at.tp_rank, shard.shape[0]),), shard


def _columns(shard: torch.Tensor, dims: Dims, at: ShardPosition) -> _Parts:
    yield 0, (slice(0, shard.shape[0]), _block(at.tp_rank, shard.shape[1])), shard


def _gate_up(shard: torch.Tensor, dims: Dims, at: ShardPosition) -> _Parts:
    for part, half in enumerate(shard.chunk(2)):
        yield part, (_block(at.tp_rank, half.shape[0]),), half


def _qkv(shard: torch.Tensor, dims: Dims, at: ShardPosition) -> _Parts:
    queries = dims.num_heads // dims.num_kv_heads
    groups = shard.shape[0] // ((queries + 2) * dims.head_dim)
    grouped = shard.view(groups, queries + 2, dims.head_dim, *shard.shape[1:])
    for part, view in enumerate((grouped[:, :queries], grouped[:, queries], grouped[:, queries + 1])):
        num_rows = groups * dims.head_dim * (queries if part == 0 else 1)
        yield part, (_block(at.tp_rank, num_rows),), view


_PARTITIONERS: dict[Partition, _Partitioner] = {
    Partition.REPLICATED: _replicated,
    Partition.VOCAB: _vocab,
    Partition.ROWS: _rows,
    Partition.COLUMNS: _columns,
    Partition.GATE_UP: _gate_up,
    Partition.QKV: _qkv,
}


def shard_slices(
    parameters: Iterable[tuple[str, torch.Tensor]],
    spec: ModelSpec,
    at: ShardPosition,
    experts_at: ShardPosition | None = None,
) -> Iterator[Slice]:
    """Slices of all local parameters (names with global layer numbers, and numbers of experts on this rank).

    Exactly one rank owns each element: replicas of a shard take turns by position, so that writes spread out.
    `experts_at`: this rank's place among those that share a layer's experts; by default as `at`.

    Raises:
        KeyError: a parameter is not in the family's table.
    """
    experts_at = experts_at or at
    rules = spec.parameter_rules(experts=experts_at.local_experts(spec.dims.dim("experts")))
    for position, (name, parameter) in enumerate(parameters):
        if name not in rules:
            raise KeyError(f"parameter {name} is not in the weight table of family {spec.family.name}")
        placed = rules[name]
        place = at if placed.expert is None else experts_at
        writes = place.replica == position % place.num_replicas and not spec.is_copy(placed.rule)
        yield from _slices_of(parameter, placed, spec, place, writes=writes)


def _slices_of(
    parameter: torch.Tensor, placed: PlacedRule, spec: ModelSpec, at: ShardPosition, *, writes: bool
) -> Iterator[Slice]:
    """The slices of one parameter; of a replicated one only the first tensor-parallel rank's are owned."""
    rule = placed.rule
    owned = writes and (at.tp_rank == 0 or rule.partition is not Partition.REPLICATED)
    for part, index, view in _PARTITIONERS[rule.partition](parameter, spec.dims, at):
        name = rule.tied_to if rule.tied_to and spec.is_copy(rule) else rule.tensors[part].name
        yield Slice(tensor=placed.name(name), index=index, view=view, owned=owned)


@torch.no_grad()
def load_slices(slices: Iterable[Slice], source: dict[str, torch.Tensor], *, optional: Collection[str] = ()) -> None:
    """Fill local shards from full tensors (memory-mapped: only the pages of the slice are read).

    An `optional` tensor that the source lacks leaves its shard as it was initialised.
    """
    for part in slices:
        if part.tensor in optional and part.tensor not in source:
            continue
        part.view.copy_(source[part.tensor][part.index].reshape(part.view.shape))


@torch.no_grad()
def store_slices(slices: Iterable[Slice], target: dict[str, torch.Tensor]) -> None:
    """Write the slices this rank owns into full tensors."""
    for part in slices:
        if part.owned:
            destination = target[part.tensor][part.index]
            destination.copy_(part.view.reshape(destination.shape))


_MIX = 2654435761  # odd, so that position weights do not repeat
# Elements that a checksum looks at together; it holds a few int64 arrays of this length.
CHECKSUM_CHUNK = 1 << 20


def checksum(view: torch.Tensor, index: Index, full_shape: tuple[int, ...]) -> int:
    """Position-weighted sum, modulo 2⁶⁴, of the bit patterns of `view` at `index` of a full tensor.

    Sums of disjoint slices add up to the checksum of the whole, whatever the split.
    """
    ints = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[view.element_size()]
    total, start = 0, 0
    for chunk in view.detach().reshape(-1).split(CHECKSUM_CHUNK):
        positions = _full_positions(torch.arange(start, start + len(chunk)), index, full_shape)
        values = chunk.cpu().view(ints).to(torch.int64)
        total += int((values * (positions * _MIX + 1)).sum())
        start += len(chunk)
    return total % (1 << 64)


def _full_positions(flat: torch.Tensor, index: Index, full_shape: tuple[int, ...]) -> torch.Tensor:
    """Flat positions in `tensor[index]` as flat positions in the tensor itself."""
    positions, stride = torch.zeros_like(flat), 1
    for axis in reversed(range(len(full_shape))):
        first, end, _ = index[axis].indices(full_shape[axis]) if axis < len(index) else (0, full_shape[axis], 1)
        positions += (flat % (end - first) + first) * stride
        flat, stride = flat // (end - first), stride * full_shape[axis]
    return positions


def count_elements(slices: Iterable[Slice]) -> dict[str, int]:
    """Tensor name → elements that this rank owns of it."""
    counts: dict[str, int] = {}
    for part in slices:
        if part.owned:
            counts[part.tensor] = counts.get(part.tensor, 0) + part.view.numel()
    return counts


def slice_checksums(slices: Iterable[Slice], shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Tensor name → checksum of what this rank owns of it."""
    sums: dict[str, int] = {}
    for part in slices:
        if part.owned:
            value = checksum(part.view, part.index, shapes[part.tensor])
            sums[part.tensor] = (sums.get(part.tensor, 0) + value) % (1 << 64)
    return sums
