"""Map shards of Megatron parameters to slices of Hugging Face tensors; load, store and checksum such slices.

Only `_CUTS` describes how parameters are partitioned. From it, `shard_boxes` computes the box (rectangular part) of
each tensor that a shard holds; weight sync plans with these. `shard_slices` pairs each box with a view of the local
shard; loading writes to these views, and export, sync and checksums read them.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from megarl.config.torch_later import Tensor, torch
from megarl.weights.boxes import Box, Index, full_box, slices_of
from megarl.weights.families import Dims, ModelSpec, PlacedRule
from megarl.weights.tables import Partition, WeightRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A slice `tensor[index]` of a full Hugging Face tensor, and the view of a local shard that holds its elements.

    The view has the same elements in the same order, but may have another shape. owned: whether this rank writes the
    slice in exports; of all ranks that hold it, one does. is_transposed: see `HFTensor`; the view is, too.
    """

    tensor: str
    index: Index
    view: Tensor
    owned: bool
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPosition:
    """A rank's position in its tensor-parallel group and among the replicas that hold the same shard.

    For expert parameters, tp_* count expert tensor parallelism, and a layer's experts are divided over `ep_size` ranks.
    """

    tp_rank: int
    tp_size: int
    replica: int
    num_replicas: int
    ep_rank: int = 0
    ep_size: int = 1


@dataclass(frozen=True, slots=True)
class Split:
    """The shard `rank` of `size` of a tensor; vocabularies are first padded to a multiple of `vocab_padding`.

    With fewer key/value heads than shards, vLLM repeats heads (`repeats_heads`), so that several shards hold the same
    one; Megatron cuts the rows of a group of heads into equal parts, whose bounds may lie within a head.
    """

    rank: int
    size: int
    vocab_padding: int
    repeats_heads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How tensors of a weight rule are cut into shards: along `axis`, or not at all if it is None.

    A shard of the parameter concatenates its parts of the rule's tensors. groups: it does so for each of this number (a
    symbol of `Dims`) of groups, such as a key/value head with its query heads. padded: the axis is padded at its end
    before the cut.
    turned: how a view of the parameter's shard has the order of the tensor, if that is not its own.
    of_keys: the axis is that of key heads.
    """

    axis: int | None
    padded: bool = False
    groups: str | None = None
    of_keys: bool = False
    turned: Callable[[Tensor], Tensor] | None = None


def _in_turns(shard: Tensor) -> Tensor:
    """Return a view [..., n/2, 2] of a shard [n, ...] whose first rows are a gate's and whose last ones are an up's."""
    halves = shard.unflatten(0, (2, -1))
    return halves.permute(*reversed(range(halves.ndim)))


_CUTS = {
    Partition.REPLICATED: _Cut(axis=None),
    Partition.VOCAB: _Cut(axis=0, padded=True),
    Partition.ROWS: _Cut(axis=0),
    Partition.KEY_ROWS: _Cut(axis=0, of_keys=True),
    Partition.COLUMNS: _Cut(axis=1),
    Partition.GATE_UP: _Cut(axis=0),
    Partition.QKV: _Cut(axis=0, groups="kv_heads"),
    Partition.GATED_QKV: _Cut(axis=0, groups="kv_heads"),
    Partition.DELTA_HEADS: _Cut(axis=0, groups="delta_key_heads"),
    Partition.GATE_UP_IN_TURNS: _Cut(axis=-1, turned=_in_turns),
    Partition.TRANSPOSED_COLUMNS: _Cut(axis=0, turned=lambda shard: shard.T),
}


def split_box(partition: Partition, shape: tuple[int, ...], part: int, dims: Dims, split: Split) -> Box:
    """Return the box (rectangular part) that a shard holds of a rule's `part`-th tensor, whose full shape is `shape`.

    Megatron and vLLM use the same cuts, but pad the vocabulary differently, and differ where there are fewer key/value
    heads than shards (see `Split`). The box is empty if a shard holds only padding, or other heads of its group.
    """
    cut, box = _CUTS[partition], full_box(shape)
    if cut.axis is None:
        return box
    axis, rank, size = cut.axis % len(shape), split.rank, split.size
    length = shape[axis]
    if cut.groups and size > dims.dim(cut.groups) and not split.repeats_heads:
        # A group of heads in the order of the parameter: rows of its query heads, its key head and its value head.
        rows = (dims.num_heads // dims.num_kv_heads * dims.head_dim, dims.head_dim, dims.head_dim)
        first, own, group = sum(rows[:part]), rows[part], sum(rows)
        cuts = (dims.num_kv_heads * group * i // size for i in (rank, rank + 1))
        start, end = (row // group * own + min(max(row % group - first, 0), own) for row in cuts)
    else:
        if cut.of_keys or (cut.groups and part > 0):
            num_groups = min(dims.dim(cut.groups or "kv_heads"), size)
            rank, size = rank * num_groups // size, num_groups
        padded = -(-length // split.vocab_padding) * split.vocab_padding if cut.padded else length
        start, end = (min(length, padded * i // size) for i in (rank, rank + 1))
    return (*box[:axis], (start, end), *box[axis + 1 :])


def is_turned(partition: Partition) -> bool:
    """Return whether the tensor of a parameter has the parameter's axes in reverse."""
    return _CUTS[partition].turned is not None


def num_groups(partition: Partition, dims: Dims, size: int) -> int:
    """Return for how many groups each of `size` shards of a parameter has parts of all tensors; 1: its groups are
    split, or the parameter has none.
    """
    symbol = _CUTS[partition].groups
    return max(1, dims.dim(symbol) // size) if symbol else 1


def turned(rule: WeightRule, parameter: Tensor) -> Tensor:
    """Return a view of a parameter that has the elements of its tensor in their order, if not always in its shape."""
    turn = _CUTS[rule.partition].turned
    if turn is None:
        return parameter.T if rule.tensors[0].is_transposed else parameter
    return turn(parameter)


def shard_boxes(rule: WeightRule, dims: Dims, split: Split, *, by_expert: bool = False) -> list[Box]:
    """Return the box that a shard holds of every tensor of a rule; sections begin where those before them end.

    by_expert: as in `ModelSpec.expected_tensors`.
    """
    rows, boxes = Counter[str](), list[Box]()
    for part, tensor in enumerate(rule.tensors):
        name = tensor.sent_name if by_expert else tensor.name
        shape, first = tuple(map(dims.dim, tensor.shape)), rows[name]
        (start, end), *others = split_box(rule.partition, shape, part, dims, split)
        boxes.append(((first + start, first + end), *others))
        rows[name] += shape[0]
    return boxes


def shard_slices(
    parameters: Iterable[tuple[str, Tensor]],
    spec: ModelSpec,
    at: ShardPosition,
    experts_at: ShardPosition | None = None,
    *,
    by_expert: bool = False,
) -> Iterator[Slice]:
    """Yield the slices of Hugging Face tensors that this rank's parameters hold.

    parameters: (name, shard), with global layer numbers and local expert numbers. Exactly one rank owns each element;
    replicas of a shard take turns, by parameter, to spread the writes. experts_at: this rank's position for experts'
    parameters; default `at`. by_expert: as in `ModelSpec.expected_tensors`.

    Raises:
        KeyError: a parameter is not in the family's table.
    """
    experts_at = experts_at or at
    # A layer's experts that this rank holds, numbered as in the whole model.
    count = spec.dims.dim("experts") // experts_at.ep_size
    rules = spec.parameter_rules(range(experts_at.ep_rank * count, (experts_at.ep_rank + 1) * count))
    for position, (name, parameter) in enumerate(parameters):
        if name not in rules:
            raise KeyError(f"parameter {name} is not in the weight table of family {spec.family.name}")
        placed = rules[name]
        place = at if placed.expert is None else experts_at
        writes = place.replica == position % place.num_replicas and not spec.is_copy(placed.rule)
        yield from _slices_of(parameter, placed, spec, place, writes=writes, by_expert=by_expert)


def _slices_of(
    shard: Tensor, placed: PlacedRule, spec: ModelSpec, at: ShardPosition, *, writes: bool, by_expert: bool
) -> Iterator[Slice]:
    """Yield the slices of one parameter's shard. Tensor-parallel rank 0 owns the slices of a replicated parameter."""
    rule, dims = placed.rule, spec.dims
    # All shards of a vocabulary have equally many rows, padding included.
    split = Split(at.tp_rank, at.tp_size, vocab_padding=shard.shape[0] * at.tp_size)
    boxes = shard_boxes(rule, dims, split, by_expert=by_expert)
    rows = [end - start for (start, end), *_ in boxes]
    # Whole groups of heads, or a part of one.
    groups = num_groups(rule.partition, dims, at.tp_size)
    grouped = shard.view(groups, shard.shape[0] // groups, *shard.shape[1:]) if groups > 1 else shard[None]
    ends = itertools.accumulate(num_rows // groups for num_rows in rows)
    owned = writes and (at.tp_rank == 0 or rule.partition is not Partition.REPLICATED)
    for tensor, box, num_rows, end in zip(rule.tensors, boxes, rows, ends, strict=True):
        if not num_rows:
            continue
        own = tensor.sent_name if by_expert else tensor.name
        name = rule.tied_to if rule.tied_to and spec.is_copy(rule) else own
        index = slices_of(box)
        # A tensor in another order makes up its parameter alone.
        one = is_turned(rule.partition)
        view = turned(rule, shard) if one else grouped[:, end - num_rows // groups : end]
        is_transposed = tensor.is_transposed and not by_expert
        if is_transposed:
            index, view = index[::-1], view.mT
        if tensor.of_expert and not by_expert:
            assert placed.expert is not None
            index = (slice(placed.expert, placed.expert + 1), *index)
        if rule.partition is Partition.GATED_QKV and tensor is rule.tensors[0]:
            # The parameter has all queries of a group, then all gates; the tensor has each head's gate next to it.
            view = view.unflatten(1, (2, -1, dims.head_dim)).transpose(1, 2)
        yield Slice(tensor=placed.name(name), index=index, view=view, owned=owned, is_transposed=is_transposed)


def flat_views(box: Box, view: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield views of a slice in the shape of boxes: one view, or one per group if groups of rows are not adjacent.

    Where gates and ups take turns, no view has the shape of a box: its last axis is in pairs.
    """
    sizes = [end - start for start, end in box]
    try:
        yield box, view.view(sizes)
    except RuntimeError:
        if list(view.shape) == [*sizes[:-1], sizes[-1] // 2, 2]:
            yield box, view
            return
        (start, end), *others = box
        rows = (end - start) // len(view)
        for i, group in enumerate(view):
            yield from flat_views(((start + i * rows, start + (i + 1) * rows), *others), group)


def load_slices(slices: Iterable[Slice], source: dict[str, Tensor], *, optional: Collection[str] = ()) -> None:
    """Fill local shards from full tensors `source`. If these are memory-mapped, only the slices' pages are read.

    optional: names of tensors that `source` may lack; their shards keep their initial values.
    """
    for part in slices:
        if part.tensor in optional and part.tensor not in source:
            continue
        part.view.detach().copy_(source[part.tensor][part.index].reshape(part.view.shape))


def store_slices(slices: Iterable[Slice], target: dict[str, Tensor]) -> None:
    """Copy the slices that this rank owns into full tensors `target`."""
    for part in slices:
        if part.owned:
            destination = target[part.tensor][part.index]
            destination.copy_(part.view.detach().reshape(destination.shape))


_MIX = 2654435761  # odd, so that position weights do not repeat
# A checksum processes this many elements at a time, and allocates a few int64 arrays of this length.
CHECKSUM_CHUNK = 1 << 20


def checksum(view: Tensor, index: Index, full_shape: tuple[int, ...]) -> int:
    """Sum up the bit patterns of `view`, weighted by their positions in the full tensor (at `index`), modulo 2⁶⁴.

    The checksums of disjoint slices add up to that of the whole tensor, however it is split.
    """
    ints = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[view.element_size()]
    total, start = 0, 0
    for chunk in view.detach().reshape(-1).split(CHECKSUM_CHUNK):
        # Flat positions in the view, as flat positions in the full tensor.
        flat = torch.arange(start, start + len(chunk))
        positions, stride = torch.zeros_like(flat), 1
        for axis in reversed(range(len(full_shape))):
            first, end, _ = index[axis].indices(full_shape[axis]) if axis < len(index) else (0, full_shape[axis], 1)
            positions += (flat % (end - first) + first) * stride
            flat, stride = flat // (end - first), stride * full_shape[axis]
        values = chunk.cpu().view(ints).to(torch.int64)
        total += int((values * (positions * _MIX + 1)).sum())
        start += len(chunk)
    return total % (1 << 64)


def count_elements(slices: Iterable[Slice]) -> dict[str, int]:
    """Return tensor name → number of elements that this rank owns."""
    counts: dict[str, int] = {}
    for part in slices:
        if part.owned:
            counts[part.tensor] = counts.get(part.tensor, 0) + part.view.numel()
    return counts


def slice_checksums(slices: Iterable[Slice], shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return tensor name → checksum of the elements that this rank owns. `shapes`: those of the full tensors."""
    sums: dict[str, int] = {}
    for part in slices:
        if part.owned:
            value = checksum(part.view, part.index, shapes[part.tensor])
            sums[part.tensor] = (sums.get(part.tensor, 0) + value) % (1 << 64)
    return sums
