"""Define the images that a row's tokens show, and the positions by which M-RoPE turns such a row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megarl.types.arrays import IdArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImage:
    """An image that tokens of a row show.

    places: the tokens, ascending, in whose place the model reads the image's features, whatever their ids. digest: what
    names the image's bytes, which a row never carries. grid: the rows and columns of its features, where positions have
    axes for these (M-RoPE); None: positions count up.
    """

    places: IdArray
    digest: str
    grid: tuple[int, int] | None = None


def row_image(places: Sequence[int], digest: str, grid: Sequence[int] | None) -> RowImage:
    """Return an image of fields that a file kept as lists.

    >>> row_image([1, 2], "a", [1, 2]).grid
    (1, 2)
    """
    return RowImage(
        places=np.asarray(places, np.int32), digest=digest, grid=None if grid is None else (grid[0], grid[1])
    )


def require_images(images: Sequence[RowImage], num_tokens: int, whose: str) -> None:
    """Raise ValueError unless the images lie one after the other within a row's tokens, with a feature in each cell.

    >>> require_images([RowImage(places=np.array([1, 2]), digest="a", grid=(1, 3))], 4, "row a/0")
    Traceback (most recent call last):
    ValueError: row a/0: image a has 2 places, expected 1 × 3
    """
    before = -1
    for image in images:
        if not len(image.places) or np.diff(image.places, prepend=before).min() < 1 or image.places[-1] >= num_tokens:
            raise ValueError(
                f"{whose}: image {image.digest} has places {image.places.tolist()}, expected ascending ones from "
                f"{before + 1} to {num_tokens - 1}"
            )
        if image.grid is not None and image.grid[0] * image.grid[1] != len(image.places):
            expected = f"{image.grid[0]} × {image.grid[1]}"
            raise ValueError(f"{whose}: image {image.digest} has {len(image.places)} places, expected {expected}")
        before = int(image.places[-1])


def shifted(images: Sequence[RowImage], by: int) -> tuple[RowImage, ...]:
    """Return images with their places moved by a number of tokens.

    >>> shifted([RowImage(places=np.array([1, 2]), digest="a")], 3)[0].places.tolist()
    [4, 5]
    """
    return tuple(replace(image, places=image.places + np.int32(by)) for image in images)


def images_on(images: Sequence[RowImage], path: npt.NDArray[np.int64]) -> tuple[RowImage, ...]:
    """Return the images that a path of a row shows, with their places on it. path: the indices of its tokens.

    >>> (image,) = images_on([RowImage(places=np.array([3, 4]), digest="a")], np.array([0, 3, 4]))
    >>> image.places.tolist()
    [1, 2]
    """
    found = []
    for image in images:
        places = np.flatnonzero(np.isin(path, image.places)).astype(np.int32)
        if 0 < len(places) < len(image.places):
            raise ValueError(
                f"image {image.digest}: a fork lies within it; expected all of its places on a path, or none"
            )
        if len(places):
            found.append(replace(image, places=places))
    return tuple(found)


def first_other(one: Sequence[RowImage], other: Sequence[RowImage]) -> int | None:
    """Return the first token that shows an image in one row and not the same in another; None: they show the same.

    >>> first_other([RowImage(places=np.array([3, 4]), digest="a")], [RowImage(places=np.array([3, 4]), digest="b")])
    3
    """
    for a, b in zip(one, other, strict=False):
        if a.digest != b.digest or not np.array_equal(a.places, b.places):
            return int(min(a.places[0], b.places[0]))
    rest = (*one[len(other) :], *other[len(one) :])
    return int(rest[0].places[0]) if rest else None


def told_apart(token_ids: IdArray, images: Sequence[RowImage]) -> npt.NDArray[np.int64]:
    """Return token ids in which the places of images have numbers of their own, equal for equal images alone.

    >>> told_apart(np.array([5, 9, 9]), [RowImage(places=np.array([1]), digest="0a")]).tolist()
    [5, -11, 9]
    """
    ids = token_ids.astype(np.int64)
    for image in images:
        ids[image.places] = -1 - int(image.digest[:15], 16)
    return ids


def rope_positions(num_tokens: int, images: Sequence[RowImage]) -> npt.NDArray[np.int64]:
    """Return the positions [3, T] by which M-RoPE turns a row: of each token its time, row and column.

    All three count up over texts. The features of an image have one time, and what follows an image of h × w features
    comes max(h, w) after its first one, and not h·w.

    >>> rope_positions(6, [RowImage(places=np.arange(1, 5), digest="a", grid=(2, 2))])[1:].tolist()
    [[0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    """
    # How far each token lies after the one before it, and within its image.
    steps, within = np.ones(num_tokens, np.int64), np.zeros((3, num_tokens), np.int64)
    for image in images:
        if image.grid is None:
            raise ValueError(f"image {image.digest} has no grid, by which M-RoPE turns its features")
        rows, columns = image.grid
        within[1:, image.places] = np.divmod(np.arange(rows * columns), columns)
        steps[image.places[1:]] = 0
        if image.places[-1] + 1 < num_tokens:
            steps[image.places[-1] + 1] = max(rows, columns)
    return steps.cumsum() - 1 + within
