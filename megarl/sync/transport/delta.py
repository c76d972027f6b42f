"""Encode the change of a message since the last weight sync without loss, as the elements whose bits have changed.

Elements are grouped in blocks of 2¹⁶. For each block, the payload has the number of changed elements (uint32) and their
positions: uint16 each, or a bitmap if that is shorter. The new values follow. If c of n elements of w bytes have
changed, evenly over the blocks, this takes 4 ⌈n / 2¹⁶⌉ + min(2c, n / 8) + w c bytes, besides checksums.

The payload has a CRC-32 of itself and of each resulting tensor. Without these, applying it to a version other than the
one it was made from would silently give wrong weights.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megarl.errors import WeightSyncError

BLOCK = 1 << 16
_BITMAP_BYTES = BLOCK // 8
_CRC_BYTES = 4
Bytes = npt.NDArray[np.uint8]
# (name, start byte, end byte, bytes per element) of each tensor part in a message.
Span = tuple[str, int, int, int]


def encode(previous: Bytes, current: Bytes, spans: Sequence[Span]) -> Bytes | None:
    """Encode the changes from `previous` to `current`. Return None if that is not shorter than `current` itself."""
    masks = [_words(previous, span) != _words(current, span) for span in spans]
    if sum(np.count_nonzero(mask) * span[3] for mask, span in zip(masks, spans, strict=True)) >= len(current):
        return None
    changed = [np.flatnonzero(mask) for mask in masks]
    counts = [
        np.bincount(places // BLOCK, minlength=-(-len(mask) // BLOCK)).astype(np.uint32)
        for places, mask in zip(changed, masks, strict=True)
    ]
    size = _CRC_BYTES + sum(_CRC_BYTES + _size(each, span[3]) for each, span in zip(counts, spans, strict=True))
    if size >= len(current):
        return None
    payload = np.empty(size, np.uint8)
    at = _CRC_BYTES
    for span, mask, places, count in zip(spans, masks, changed, counts, strict=True):
        crc, values = _crc(current[span[1] : span[2]]), _words(current, span)[places]
        for section in (crc, count, *_places(mask, places, count), values):
            raw = section.view(np.uint8).ravel()
            payload[at : at + len(raw)] = raw
            at += len(raw)
    assert at == size, "the size was computed wrongly"
    payload[:_CRC_BYTES] = _crc(payload[_CRC_BYTES:]).view(np.uint8)
    return payload


def apply(payload: Bytes, target: Bytes, spans: Sequence[Span]) -> None:
    """Apply encoded changes to `target` in place, which must be the version that they were computed from.

    Raises:
        WeightSyncError: the payload was corrupted on its way, or `target` is another version.
    """
    if payload[:_CRC_BYTES].tobytes() != _crc(payload[_CRC_BYTES:]).tobytes():
        raise WeightSyncError("a message with changed weights arrived with other bits than were sent")
    reader = _Reader(payload[_CRC_BYTES:])
    wrong = []
    for span in spans:
        name, start, end, _ = span
        words = _words(target, span)
        crc = reader.take(1, np.dtype(np.uint32))
        counts = reader.take(-(-len(words) // BLOCK), np.dtype(np.uint32))
        positions = _positions(counts, reader)
        words[positions] = reader.take(len(positions), words.dtype)
        if crc.tobytes() != _crc(target[start:end]).tobytes():
            wrong.append(name)
    if wrong:
        raise WeightSyncError(
            f"{len(wrong)} tensors differ between trainer and engine after their changes were applied: {wrong[:3]}; "
            f"the engine had another version before"
        )


class _Reader:
    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int, dtype: np.dtype[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
        """Return the next `count` numbers of the payload."""
        end = self._at + count * dtype.itemsize
        section, self._at = self._data[self._at : end], end
        return section.view(dtype)


def _words(message: Bytes, span: Span) -> npt.NDArray[np.unsignedinteger]:
    """Return the elements of a span (a part of a tensor in a message) as unsigned integers with the same bits."""
    _, start, end, width = span
    return message[start:end].view(f"u{width}")


def _has_bitmap(counts: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
    return counts > _BITMAP_BYTES // 2


def _size(counts: npt.NDArray[np.uint32], width: int) -> int:
    """Return the encoded size in bytes of a span: changes per block, their positions, and new values."""
    places = np.where(_has_bitmap(counts), _BITMAP_BYTES, 2 * counts.astype(np.int64))
    return 4 * len(counts) + int(places.sum()) + width * int(counts.sum())


def _places(
    mask: npt.NDArray[np.bool_], changed: npt.NDArray[np.int64], counts: npt.NDArray[np.uint32]
) -> tuple[Bytes, npt.NDArray[np.uint16]]:
    """Return bitmaps for blocks with many changes, and uint16 positions of changes in all other blocks."""
    with_bitmap = _has_bitmap(counts)
    bitmaps = np.zeros((int(with_bitmap.sum()), BLOCK), np.bool_)
    for row, block in enumerate(np.flatnonzero(with_bitmap)):
        part = mask[block * BLOCK : (block + 1) * BLOCK]
        bitmaps[row, : len(part)] = part
    alone = changed[~with_bitmap[changed // BLOCK]]
    return np.packbits(bitmaps, axis=1), (alone % BLOCK).astype(np.uint16)


def _positions(counts: npt.NDArray[np.unsignedinteger], reader: _Reader) -> npt.NDArray[np.int64]:
    """Decode the positions in a span at which elements have changed, in ascending order."""
    with_bitmap = _has_bitmap(counts)
    blocks = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    in_bitmap = with_bitmap[blocks]
    bitmaps = reader.take(int(with_bitmap.sum()) * _BITMAP_BYTES, np.dtype(np.uint8)).reshape(-1, _BITMAP_BYTES)
    places = np.empty(len(blocks), np.int64)
    places[in_bitmap] = np.nonzero(np.unpackbits(bitmaps, axis=1))[1]
    places[~in_bitmap] = reader.take(int((~in_bitmap).sum()), np.dtype(np.uint16))
    return blocks * BLOCK + places


def _crc(data: Bytes) -> npt.NDArray[np.uint32]:
    return np.array([zlib.crc32(data.data)], np.uint32)
