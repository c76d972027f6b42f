"""How tensor parallelism splits a Hugging Face tensor, in the tensor's own coordinates: one rule per partition.

Megatron and vLLM agree on all of it but the padding of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megarl.weights.boxes import Box, full_box
from megarl.weights.families import Dims
from megarl.weights.tables import Partition


@dataclass(frozen=True, slots=True)
class Split:
    """The `rank`-th of `size` shards; vocabularies are padded to a multiple of `vocab_padding` first."""

    rank: int
    size: int
    vocab_padding: int


# (shape of the tensor, its place in the rule, sizes, shard) → box
_Splitter = Callable[[tuple[int, ...], int, Dims, Split], Box]


def split_box(partition: Partition, shape: tuple[int, ...], part: int, dims: Dims, split: Split) -> Box:
    """A shard of a rule's `part`-th tensor. Key and value heads repeat where there are fewer than shards."""
    return _SPLITTERS[partition](shape, part, dims, split)


def _whole(shape: tuple[int, ...], part: int, dims: Dims, split: Split) -> Box:
    return full_box(shape)


def _vocab(shape: tuple[int, ...], part: int, dims: Dims, split: Split) -> Box:
    rows, *others = shape
    padded = -(-rows // split.vocab_padding) * split.vocab_padding
    start, end = (min(rows, padded * rank // split.size) for rank in (split.rank, split.rank + 1))
    return ((start, end), *full_box(others))


def _rows(shape: tuple[int, ...], part: int, dims: Dims, split: Split) -> Box:
    rows, *others = shape
    return (_block(split.rank, split.size, rows), *full_box(others))


def _columns(shape: tuple[int, ...], part: int, dims: Dims, split: Split) -> Box:
    return ((0, shape[0]), _block(split.rank, split.size, shape[1]))


def _qkv(shape: tuple[int, ...], part: int, dims: Dims, split: Split) -> Box:
    rows, *others = shape
    # The first tensor of the rule has the query heads.
    heads = dims.num_heads if part == 0 else dims.num_kv_heads
    shards = min(heads, split.size)
    return (_block(split.rank * shards // split.size, shards, rows), *full_box(others))


def _block(rank: int, size: int, length: int) -> tuple[int, int]:
    return length * rank // size, length * (rank + 1) // size


_SPLITTERS: dict[Partition, _Splitter] = {
    Partition.REPLICATED: _whole,
    Partition.VOCAB: _vocab,
    Partition.ROWS: _rows,
    Partition.COLUMNS: _columns,
    Partition.GATE_UP: _rows,
    Partition.QKV: _qkv,
}
