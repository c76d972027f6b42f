"""Boxes of elements in the coordinates of a full Hugging Face tensor, and their common refinement."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megarl.weights.slices import Index

# [start, end) of every axis.
Box: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box, and the places in a list of boxes of those that contain it."""

    box: Box
    holders: tuple[int, ...]


def full_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def box_of(index: Index, shape: Sequence[int]) -> Box:
    """The box of `tensor[index]`; axes that the index leaves out are whole."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    return (*ranges, *((0, size) for size in shape[len(index) :]))


def slices_of(box: Box, origin: Box | None = None) -> Index:
    """The index of a box in its tensor, or in the part of it that `origin` covers."""
    starts = [start for start, _ in origin] if origin else [0] * len(box)
    return tuple(slice(start - first, end - first) for (start, end), first in zip(box, starts, strict=True))


def num_elements(box: Box) -> int:
    return math.prod(end - start for start, end in box)


def contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def intersection(left: Box, right: Box) -> Box | None:
    """What both have; None if that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < end for start, end in common) else None


@functools.lru_cache(maxsize=1 << 16)
def pieces(wanted: Box, held: tuple[Box, ...]) -> tuple[Piece, ...]:
    """`wanted`, cut wherever a box of `held` begins or ends, in row-major order; each piece once.

    The layers of a model repeat, so that the answer is usually known.
    """
    cuts = [_cuts(axis, wanted, held) for axis in range(len(wanted))]
    grid = itertools.product(*(list(itertools.pairwise(places)) for places in cuts))
    return tuple(Piece(box, tuple(i for i, each in enumerate(held) if contains(each, box))) for box in grid)


def _cuts(axis: int, wanted: Box, held: Sequence[Box]) -> list[int]:
    start, end = wanted[axis]
    inner = {place for box in held for place in box[axis] if start < place < end}
    return sorted({start, end, *inner})


def split_rows(box: Box, max_elements: int) -> list[Box]:
    """A box in blocks of rows (indices of its first axis) of at most `max_elements`, or of one row if that is more."""
    (start, end), *others = box
    rows = max(1, max_elements // max(1, num_elements(tuple(others))))
    return [((first, min(first + rows, end)), *others) for first in range(start, end, rows)]
