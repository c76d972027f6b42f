"""Send messages as differences from the last weight sync, by wrapping any sender and its receiver.

Sender and receiver keep the last version of each message in host memory. A payload begins with its length; full length
means that the message is sent in full. The transport below must take messages shorter than planned.

The change of a message since the last sync is sent without loss, as the elements whose bits have changed, grouped in
blocks of 2¹⁶. For each block, the payload has the number of changed elements (uint32) and their positions: uint16 each,
or a bitmap if that is shorter. The new values follow. If c of n elements of w bytes have changed, evenly over the
blocks, this takes 4 ⌈n / 2¹⁶⌉ + min(2c, n / 8) + w c bytes, besides checksums: a CRC-32 of the payload itself and of
each resulting tensor. Without these, applying it to another version would silently give wrong weights.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from megarl.errors import WeightSyncError
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.transports import (
    Arrival,
    Key,
    ProcessPlan,
    ReceivingEnd,
    SendingEnd,
    Staging,
    Transport,
    key_of,
    pack,
)
from megarl.weights.boxes import num_elements

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


# The length of what follows, as int64.
_HEAD_BYTES = 8


class _Versions:
    """The last sent data of each message. Senders compute differences from it, and receivers add differences to it."""

    def __init__(self, process_plan: ProcessPlan) -> None:
        self._specs = process_plan.specs
        self.kept = dict[Key, torch.Tensor]()

    def spans(self, message: WeightMessage) -> list[Span]:
        widths = {part.tensor: self._specs[part.tensor].dtype.itemsize for part in message.parts}
        return [
            (part.tensor, part.offset, part.offset + num_elements(part.box) * widths[part.tensor], widths[part.tensor])
            for part in message.parts
        ]

    def keep(self, message: WeightMessage, data: torch.Tensor) -> None:
        if (kept := self.kept.get(key_of(message))) is None:
            self.kept[key_of(message)] = data.clone()
        else:
            kept.copy_(data)


class DeltaSender(SendingEnd):
    """A sender that transmits only the elements that changed since the last sync, if this is shorter."""

    def __init__(self, process_plan: ProcessPlan, transport: SendingEnd) -> None:
        self._transport, self._versions = transport, _Versions(process_plan)
        largest = max((message.num_bytes for message in process_plan.messages), default=0)
        self._packed = torch.empty(largest, dtype=torch.uint8)

    def forget(self) -> None:
        self._versions.kept.clear()

    def start(self, transfer: int) -> None:
        self._transport.start(transfer)

    def post(self, before: int) -> None:
        self._transport.post(before)

    def send(self, message: WeightMessage, parts: Iterable[torch.Tensor]) -> None:
        """Send what has changed of a message, or all of it if that is not longer."""
        current, last = self._packed[: message.num_bytes], self._versions.kept.get(key_of(message))
        pack(parts, current)
        delta = None if last is None else encode(last.numpy(), current.numpy(), self._versions.spans(message))
        self._versions.keep(message, current)
        # Send the kept copy, which does not change before the next transfer; the packing buffer does with each message.
        payload = self._versions.kept[key_of(message)] if delta is None else torch.from_numpy(delta)
        sent = message._replace(num_bytes=_HEAD_BYTES + payload.nbytes)
        self._transport.send(sent, [torch.tensor([payload.nbytes]), payload])

    def flush(self) -> None:
        self._transport.flush()

    def close(self) -> None:
        self._transport.close()


class DeltaReceiver(ReceivingEnd):
    """The receiver of messages from a `DeltaSender`; it reconstructs the full messages."""

    def __init__(self, process_plan: ProcessPlan, transport: ReceivingEnd) -> None:
        self._transport, self._versions = transport, _Versions(process_plan)

    def start(self, transfer: int) -> None:
        self._transport.start(transfer)

    def expect(self, messages: Iterable[WeightMessage]) -> None:
        self._transport.expect(map(_with_head, messages))

    def receive(self, message: WeightMessage) -> Arrival:
        """Wait for what is sent of a message, and return all of it."""
        data = self._transport.receive(_with_head(message)).data
        length = int(data[:_HEAD_BYTES].view(torch.int64))
        if not 0 <= length <= message.num_bytes:
            raise WeightSyncError(
                f"message {message.turn} of trainer rank {message.source} to engine worker {message.receiver} says "
                f"that it has {length} bytes, expected at most {message.num_bytes}: somebody else has written there"
            )
        payload = data[_HEAD_BYTES : _HEAD_BYTES + length].clone()
        if length == message.num_bytes:
            self._versions.keep(message, payload)
        else:
            assert key_of(message) in self._versions.kept, "changes of a message that was never sent in full"
            kept = self._versions.kept[key_of(message)]
            apply(payload.numpy(), kept.numpy(), self._versions.spans(message))
        return Arrival(self._versions.kept[key_of(message)], length)

    def release(self, message: WeightMessage) -> None:
        self._transport.release(_with_head(message))

    def close(self) -> None:
        self._transport.close()


def _with_head(message: WeightMessage) -> WeightMessage:
    return message._replace(num_bytes=_HEAD_BYTES + message.num_bytes)


def _below(process_plan: ProcessPlan) -> ProcessPlan:
    """Return the process plan of the transport that carries the differences."""
    return replace(process_plan, messages=tuple(map(_with_head, process_plan.messages)))


def differences_over(transport: Transport) -> Transport:
    """Return the transport that sends over another one what has changed since the last sync."""

    def staging(messages: Sequence[WeightMessage], process: int) -> Staging:
        """Count what is kept too."""
        below = transport.staging(list(map(_with_head, messages)), process)
        packed = max((message.num_bytes for message in messages if message.source == process), default=0)
        return replace(below, host=below.host + packed + sum(message.num_bytes for message in messages))

    return Transport(
        name=f"differences over {transport.name}",
        # Differences are made in host memory, and would take longer than a copy on the device.
        fits=lambda link: link.delta and not link.same_device and transport.fits(link),
        sender=lambda process_plan, device: DeltaSender(process_plan, transport.sender(_below(process_plan), device)),
        receiver=lambda process_plan, device: DeltaReceiver(
            process_plan, transport.receiver(_below(process_plan), device)
        ),
        staging=staging,
        members=transport.members,
    )
