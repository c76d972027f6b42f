"""Implement both ends of a weight sync: ranks send slices of their shards, engine workers receive whole tensors."""

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.sync.plan.build import Fragment
from megarl.sync.transport.casts import SCALED, from_transport, largest_magnitude, to_transport
from megarl.sync.transport.routed import RoutedReceiver, RoutedSender
from megarl.sync.transport.transports import ProcessPlan, key_of, unpack
from megarl.weights.boxes import Box, Boxes, box_of, intersection, joined, num_elements, slices_of
from megarl.weights.merging import Merger
from megarl.weights.slices import Index, Slice, checksum, flat_views

# By tensor name: boxes of the tensor in row-major order, each with a view of a local shard in its shape, or with its
# last axis in pairs.
_Views = Mapping[str, list[tuple[Box, torch.Tensor]]]


def holding_of(slices: Iterable[Slice], shapes: Mapping[str, Sequence[int]]) -> dict[str, Boxes]:
    """Return tensor → boxes (rectangular parts) that a rank holds, even if another owns them; tied tensors once."""
    found = defaultdict[str, set[Box]](set)
    for part in slices:
        found[part.tensor].add(box_of(part.index, shapes[part.tensor]))
    return {name: joined(boxes) for name, boxes in found.items()}


class BridgeSender:
    """The sending end of weight syncs on one trainer rank."""

    def __init__(self, process_plan: ProcessPlan, transport: RoutedSender) -> None:
        self._share, self._transport, self._scales = process_plan, transport, dict[str, float]()
        self._parts = [message.parts for message in process_plan.messages]

    @torch.no_grad()
    def largest(self, slices: Iterable[Slice]) -> dict[str, float]:
        """Return max |x| on this rank of each tensor that is sent in float8, from which scales are chosen."""
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
        merger: Merger | None = None,
    ) -> dict[int, dict[str, int]]:
        """Send this rank's messages of one weight sync. Return checksums of the sent data: receiver → tensor →
        checksum.

        with_checksums: whether to compute them; else the result is empty. scales: of tensors sent in float8, the same
        on all ranks. full: send whole messages this time, not differences. merger: adds adapters to what is sent.
        """
        specs, self._scales = self._share.specs, dict(scales or {})
        found = defaultdict[str, dict[Box, torch.Tensor]](dict)
        for held in (held for held in slices if held.tensor in specs):
            found[held.tensor].update(flat_views(box_of(held.index, specs[held.tensor].shape), held.view))
        views = {name: sorted(boxes.items(), key=operator.itemgetter(0)) for name, boxes in found.items()}
        sums = defaultdict[int, dict[str, int]](dict)
        if full:
            self._transport.forget()
        self._transport.start(transfer)
        for message, parts in zip(self._share.messages, self._parts, strict=True):
            self._transport.send(message, (self._cast(*each, merger) for each in _overlaps(parts, views)))
            if with_checksums:
                for part, box, view in _overlaps(parts, views):
                    name, of_receiver = part.tensor, sums[message.receiver]
                    added = checksum(self._cast(part, box, view, merger), slices_of(box), specs[name].shape)
                    of_receiver[name] = (of_receiver.get(name, 0) + added) % (1 << 64)
        self._transport.flush()
        return dict(sums)

    def _cast(self, part: Fragment, box: Box, view: torch.Tensor, merger: Merger | None) -> torch.Tensor:
        if merger is not None:
            view = merger.merged(part.tensor, box, view)
        return to_transport(view, self._share.specs[part.tensor].dtype, self._scales.get(part.tensor))


class _Coming(NamedTuple):
    """A part of an incoming message: the tensor it belongs to, its index in that tensor, and its number of elements."""

    tensor: str
    place: Index
    size: int


class BridgeReceiver:
    """The receiving end of weight syncs in one engine worker."""

    def __init__(self, process_plan: ProcessPlan, transport: RoutedReceiver, device: torch.device) -> None:
        self._share, self._transport, self._device = process_plan, transport, device
        self._buckets = [list(each) for _, each in itertools.groupby(process_plan.messages, key=lambda m: m.bucket)]
        # The parts of each message, and the number of elements of each tensor that arrive in all.
        self._coming = {
            key_of(message): [_Coming(p.tensor, slices_of(p.box), num_elements(p.box)) for p in message.parts]
            for message in process_plan.messages
        }
        self._num_coming = Counter[str]()
        for part in itertools.chain.from_iterable(self._coming.values()):
            self._num_coming[part.tensor] += part.size
        self.wire_bytes = 0

    def receive(self, transfer: int, *, fill: float | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor of full shape) as soon as the parts that this worker needs are received.

        fill: the value of all other elements; by default they are undefined. Afterwards, `wire_bytes` is the number of
        bytes that came over the wire, not from memory shared with a trainer rank.
        """
        self.wire_bytes = 0
        missing, tensors = self._num_coming.copy(), dict[str, torch.Tensor]()

        def place_of(part: _Coming) -> torch.Tensor:
            if part.tensor not in tensors:
                tensors[part.tensor] = self._allocate(part.tensor, fill)
            return tensors[part.tensor][part.place]

        self._transport.start(transfer)
        yield from ((name, self._allocate(name, fill)) for name in self._share.needs if name not in missing)
        for bucket, following in itertools.zip_longest(self._buckets, self._buckets[1:], fillvalue=()):
            self._transport.expect([*bucket, *following])
            for message in bucket:
                end, parts = self._transport.end_of(message), self._coming[key_of(message)]
                arrival = end.receive(message)
                if not message.local:
                    self.wire_bytes += arrival.num_bytes
                filled = unpack(arrival.data, map(place_of, parts), non_blocking=arrival.stays)
                for part, _ in zip(parts, filled, strict=True):
                    missing[part.tensor] -= part.size
                    if missing[part.tensor] == 0:
                        yield part.tensor, tensors.pop(part.tensor)
                end.release(message)
        assert not tensors, f"the plan left {sorted(tensors)[:3]} incomplete"

    def restore(
        self, name: str, tensor: torch.Tensor, scale: float | None, *, fill: float | None = None
    ) -> torch.Tensor:
        """Return a received tensor, in float32 times `scale` if it has one, else unchanged. `fill`: see `receive`."""
        if scale is None:
            return tensor
        restored = torch.empty(tensor.shape, dtype=torch.float32, device=self._device)
        if fill is not None:
            restored.fill_(fill)
        for index in map(slices_of, self._share.needs[name]):
            restored[index] = from_transport(tensor[index], scale)
        return restored

    def checksum(self, name: str, tensor: torch.Tensor) -> int:
        """Return the checksum of the received part of a tensor, which must equal the sum of its senders' checksums."""
        indices, shape = map(slices_of, self._share.needs[name]), self._share.specs[name].shape
        return sum(checksum(tensor[index], index, shape) for index in indices) % (1 << 64)

    def _allocate(self, name: str, fill: float | None) -> torch.Tensor:
        spec = self._share.specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return tensor if fill is None else tensor.fill_(fill)


def _overlaps(parts: Iterable[Fragment], views: _Views) -> Iterator[tuple[Fragment, Box, torch.Tensor]]:
    """For each part of a message, yield the overlaps with local views, as box and cut view, in sending order."""
    for part in parts:
        for box, view in views[part.tensor]:
            if (common := intersection(part.box, box)) is not None:
                index = slices_of(common, box)
                if view.ndim > len(box):
                    *rows, last = index
                    assert last.start % 2 == last.stop % 2 == 0, "a pair of gate and up was split"
                    index = (*rows, slice(last.start // 2, last.stop // 2))
                yield part, common, view if common == box else view[index]
