"""Implement the two ends of a weight sync: ranks send slices of their shards, workers receive full-shape tensors."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.sync.plan.build import Fragment
from megarl.sync.wire.casts import SCALED, from_wire, largest_magnitude, to_wire
from megarl.sync.wire.delta_wire import DeltaReceiver, DeltaSender, key_of
from megarl.sync.wire.wires import ReceivingEnd, SendingEnd, Share
from megarl.weights.boxes import Box, box_of, intersection, num_elements, slices_of
from megarl.weights.slices import Index, Slice, checksum

# By tensor name: boxes of the tensor, each with the view of a local shard that holds it, in the shape of the box.
_Views = Mapping[str, list[tuple[Box, torch.Tensor]]]


def holding_of(slices: Iterable[Slice], shapes: Mapping[str, Sequence[int]]) -> dict[str, Box]:
    """Return which box of each tensor a rank holds, replicas included; a tensor held twice (tied embeddings) counts
    once.
    """
    return {part.tensor: box_of(part.index, shapes[part.tensor]) for part in slices}


class BridgeSender:
    """The sending end of a weight sync on one trainer rank."""

    def __init__(self, share: Share, wire: SendingEnd) -> None:
        self._share, self._scales = share, dict[str, float]()
        self._parts = [message.parts for message in share.messages]
        self._delta = DeltaSender(share, wire) if share.delta else None
        self._wire = self._delta or wire

    @torch.no_grad()
    def largest(self, slices: Iterable[Slice]) -> dict[str, float]:
        """Return the largest magnitude on this rank of each tensor that is sent in float8."""
        found = dict[str, float]()
        for part in slices:
            if part.tensor in self._share.specs and self._share.specs[part.tensor].dtype == SCALED:
                found[part.tensor] = max(found.get(part.tensor, 0.0), largest_magnitude(part.tensor, part.view))
        return found

    @torch.no_grad()
    def send(
        self,
        slices: Iterable[Slice],
        transfer: int,
        *,
        with_checksums: bool,
        scales: Mapping[str, float] | None = None,
        full: bool = False,
    ) -> dict[int, dict[str, int]]:
        """Send this rank's messages; return the checksums of what was sent, as receiver → tensor → checksum.

        with_checksums: compute them; the result is empty otherwise. scales: those of tensors that travel with one, the
        same on all ranks. full: send everything this time, not differences.
        """
        specs, self._scales = self._share.specs, dict(scales or {})
        views = {
            part.tensor: list(_flat_views(box_of(part.index, specs[part.tensor].shape), part.view))
            for part in slices
            if part.tensor in specs
        }
        sums = defaultdict[int, dict[str, int]](dict)
        if full and self._delta is not None:
            self._delta.forget()
        self._wire.start(transfer)
        for message, parts in zip(self._share.messages, self._parts, strict=True):
            self._wire.send(message, (self._cast(part, view) for part, _, view in _overlaps(parts, views)))
            if with_checksums:
                for part, box, view in _overlaps(parts, views):
                    name, of_sink = part.tensor, sums[message.sink]
                    added = checksum(self._cast(part, view), slices_of(box), specs[name].shape)
                    of_sink[name] = (of_sink.get(name, 0) + added) % (1 << 64)
        self._wire.flush()
        return dict(sums)

    def _cast(self, part: Fragment, view: torch.Tensor) -> torch.Tensor:
        return to_wire(view, self._share.specs[part.tensor].dtype, self._scales.get(part.tensor))


class _Coming(NamedTuple):
    """A tensor part in an incoming message: its tensor, its place in it, and its number of elements."""

    tensor: str
    place: Index
    size: int


class BridgeReceiver:
    """The receiving end of a weight sync in one engine worker."""

    def __init__(self, share: Share, wire: ReceivingEnd, device: torch.device) -> None:
        self._share, self._device = share, device
        self._delta = DeltaReceiver(share, wire) if share.delta else None
        self._wire = self._delta or wire
        self._buckets = [list(each) for _, each in itertools.groupby(share.messages, key=lambda m: m.bucket)]
        # The parts of each message, and the number of elements of each tensor that arrive in all.
        self._coming = {
            key_of(message): [_Coming(p.tensor, slices_of(p.box), num_elements(p.box)) for p in message.parts]
            for message in share.messages
        }
        self._num_coming = Counter[str]()
        for part in itertools.chain.from_iterable(self._coming.values()):
            self._num_coming[part.tensor] += part.size
        self.wire_bytes = 0

    def receive(self, transfer: int, *, fill: float | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of full shape in which only what this worker needs is filled, each once it is complete.

        fill: the value of all other elements; by default they are undefined. `wire_bytes` then says how many bytes came
        over the wire.
        """
        self.wire_bytes = 0
        missing, tensors = self._num_coming.copy(), dict[str, torch.Tensor]()

        def place_of(part: _Coming) -> torch.Tensor:
            if part.tensor not in tensors:
                tensors[part.tensor] = self._allocate(part.tensor, fill)
            return tensors[part.tensor][part.place]

        self._wire.start(transfer)
        yield from ((name, self._allocate(name, fill)) for name in self._share.needs if name not in missing)
        for bucket, following in itertools.zip_longest(self._buckets, self._buckets[1:], fillvalue=()):
            self._wire.expect([*bucket, *following])
            for message in bucket:
                arrival, parts = self._wire.receive(message), self._coming[key_of(message)]
                if not message.local:
                    sent = message if self._delta is None else self._delta.sent(message)
                    self.wire_bytes += sent.num_bytes
                for part, _ in zip(parts, arrival.read(map(place_of, parts)), strict=True):
                    missing[part.tensor] -= part.size
                    if missing[part.tensor] == 0:
                        yield part.tensor, tensors.pop(part.tensor)
                self._wire.release(message)
        assert not tensors, f"the plan left {sorted(tensors)[:3]} incomplete"

    def restore(
        self, name: str, tensor: torch.Tensor, scale: float | None, *, fill: float | None = None
    ) -> torch.Tensor:
        """Return a received tensor, multiplied by its scale in float32 if it was sent in float8; `fill` is as for
        `receive`.
        """
        if scale is None:
            return tensor
        index = slices_of(self._share.needs[name])
        restored = torch.empty(tensor.shape, dtype=torch.float32, device=self._device)
        if fill is not None:
            restored.fill_(fill)
        restored[index] = from_wire(tensor[index], scale)
        return restored

    def checksum(self, name: str, tensor: torch.Tensor) -> int:
        """Return the checksum of what this worker needs of a tensor; the senders' checksums must add up to it."""
        index = slices_of(self._share.needs[name])
        return checksum(tensor[index], index, self._share.specs[name].shape)

    def _allocate(self, name: str, fill: float | None) -> torch.Tensor:
        spec = self._share.specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return tensor if fill is None else tensor.fill_(fill)


def _flat_views(box: Box, view: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield a slice as views in the shape of boxes: a single view, or one per group if groups of rows lie apart."""
    try:
        yield box, view.view([end - start for start, end in box])
    except RuntimeError:
        (start, end), *others = box
        rows = (end - start) // len(view)
        for i, group in enumerate(view):
            yield from _flat_views(((start + i * rows, start + (i + 1) * rows), *others), group)


def _overlaps(parts: Iterable[Fragment], views: _Views) -> Iterator[tuple[Fragment, Box, torch.Tensor]]:
    """Yield the boxes of each part that local views hold, and the views cut to them, in the order of travel."""
    for part in parts:
        for box, view in views[part.tensor]:
            if (common := intersection(part.box, box)) is not None:
                yield part, common, view if common == box else view[slices_of(common, box)]
