"""Compute with boxes, which are rectangular parts of a full Hugging Face tensor: a range [start, end) on every axis."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# The range [start, end) on every axis.
Box: TypeAlias = tuple[tuple[int, int], ...]
# The disjoint boxes, none of them empty, that make up a part of a tensor.
Boxes: TypeAlias = tuple[Box, ...]
# An index of a tensor; trailing axes that it leaves out are taken whole.
Index: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class BoxPart:
    """A part of a wanted box, and the indices (in a list of held boxes) of all boxes that contain this part."""

    box: Box
    holders: tuple[int, ...]


def full_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor of this shape."""
    return tuple((0, size) for size in shape)


def box_of(index: Index, shape: Sequence[int]) -> Box:
    """Return the box that `tensor[index]` covers; axes missing at the end of `index` are covered completely."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    return (*ranges, *((0, size) for size in shape[len(index) :]))


def slices_of(box: Box, origin: Box | None = None) -> Index:
    """Return the index of a box in its full tensor or, with `origin`, in a tensor that holds only the box `origin`."""
    starts = [start for start, _ in origin] if origin else [0] * len(box)
    return tuple(slice(start - first, end - first) for (start, end), first in zip(box, starts, strict=True))


def num_elements(box: Box) -> int:
    return math.prod(end - start for start, end in box)


def contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def intersection(left: Box, right: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < end for start, end in common) else None


def joined(boxes: Iterable[Box]) -> Boxes:
    """Return disjoint boxes without empty ones, in row-major order; those whose elements follow each other are one."""
    found = list[Box]()
    for box in sorted(filter(num_elements, boxes)):
        while found and (both := _union(found[-1], box)) is not None:
            found.pop()
            box = both
        found.append(box)
    return tuple(found)


def _union(left: Box, right: Box) -> Box | None:
    """Return the union of two boxes if it is a box that has first all elements of `left`, then all of `right`."""
    axis = next(i for i, (mine, its) in enumerate(zip(left, right, strict=True)) if mine != its)
    follow = left[axis][1] == right[axis][0] and left[axis + 1 :] == right[axis + 1 :]
    if not follow or any(end - start > 1 for start, end in left[:axis]):
        return None
    return (*left[:axis], (left[axis][0], right[axis][1]), *left[axis + 1 :])


@functools.lru_cache(maxsize=1 << 16)
def pieces(wanted: Box, held: tuple[Box, ...]) -> tuple[BoxPart, ...]:
    """Cut the box `wanted` wherever a box of `held` begins or ends; return the disjoint pieces in row-major order.

    Results are cached, because all layers of a model have the same boxes.
    """
    ranges = []
    for axis, (start, end) in enumerate(wanted):
        inner = {place for box in held for place in box[axis] if start < place < end}
        ranges.append(list(itertools.pairwise(sorted({start, end, *inner}))))
    grid = itertools.product(*ranges)
    return tuple(BoxPart(box, tuple(i for i, each in enumerate(held) if contains(each, box))) for box in grid)


def split_rows(box: Box, max_elements: int) -> list[Box]:
    """Split a box along its first axis into blocks of at most `max_elements` elements, but at least one row each."""
    (start, end), *others = box
    rows = max(1, max_elements // max(1, num_elements(tuple(others))))
    return [((first, min(first + rows, end)), *others) for first in range(start, end, rows)]
