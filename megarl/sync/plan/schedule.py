"""Order what ranks send, so that all of them always send and all engine workers always receive.

In the model's own order, all workers would first need weights of the first pipeline stage. Its ranks would be the
bottleneck, while those of other stages would be idle. Each worker therefore starts at another layer, and within a layer
it takes what a free rank has. This is the scheduling of an input-queued switch: a transfer begins as soon as its source
and its sink are both free, and ends after a time proportional to its bytes.
"""

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from megarl.sync.plan.assign import Block, Layer

# Process → its host; empty: not known, so that all links count as equally fast.
Hosts: TypeAlias = Mapping[int, Hashable]
# How much longer a byte takes between hosts (400 Gb/s) than within one (NVLink 4, 450 GB/s).
_BETWEEN_HOSTS = 9


class Transfer(NamedTuple):
    """A block to send from a source rank to a sink worker; local: they share memory."""

    source: int
    sink: int
    local: bool
    block: Block


class _Sink:
    """What a sink still lacks: whole layers, and of its present layer blocks from each source (by the source's bit).

    near: the sources on its host. turn: the bit of the source to ask first. needs: the bits of all sources that have
    blocks for it now.
    """

    __slots__ = ("blocks", "layers", "near", "needs", "num_layers", "number", "turn")

    def __init__(
        self, number: int, layers: Sequence[int], stages: Sequence[Hashable], near: frozenset[int], turn: int
    ) -> None:
        self.number, self.near, self.turn, self.needs, self.num_layers = number, near, turn, 0, len(layers)
        self.blocks = dict[int, tuple[Block, ...]]()
        # The layers of each pipeline stage, in the order in which this sink takes them.
        self.layers = dict[Hashable, deque[int]]()
        for layer in layers:
            self.layers.setdefault(stages[layer], deque()).append(layer)

    def seconds(self, source: int, num_bytes: int) -> int:
        """Return the time of a transfer, in units of a byte's within a host."""
        return num_bytes if source in self.near else num_bytes * _BETWEEN_HOSTS


class _Switch:
    """The state of all transfers. Sources and sinks have numbers from 0, and sets of them are bits of an integer.

    to_send: the time that each source still needs for everything; asked: the part of it for the present layers of all
    sinks. wanted: the sinks that lack something from each source now; turns: which of them it serves first.
    """

    def __init__(self, layers: Sequence[Layer], sources: Sequence[int], sinks: Sequence[int], hosts: Hosts) -> None:
        self._layers, self.sources = layers, sources
        self._bits = {source: bit for bit, source in enumerate(sources)}
        self.asked, self.to_send = [0] * len(sources), [0] * len(sources)
        self.wanted, self.turns = [0] * len(sources), [0] * len(sources)
        self.free_sources, self.free_sinks = (1 << len(sources)) - 1, 0
        begins = list(itertools.accumulate((layer.size for layer in layers), initial=0))
        stages = [layer.holders for layer in layers]
        near = {
            host: frozenset(each for each in sources if hosts.get(each) == host) for host in {*hosts.values(), None}
        }
        self.sinks = list[_Sink]()
        for i, sink in enumerate(sinks):
            first = min(bisect.bisect_right(begins, i * begins[-1] // len(sinks)), len(layers)) - 1
            ring = [*range(first, len(layers)), *range(first)]
            self.sinks.append(_Sink(sink, ring, stages, near[hosts.get(sink)], i * len(sources) // len(sinks)))
        for layer, each in itertools.product(layers, self.sinks):
            for source, blocks in layer.wire[each.number].items():
                self.to_send[self._bits[source]] += each.seconds(source, _size(blocks))

    def next_layer(self, sink: _Sink) -> int:
        """Choose the stage whose next layer a sink would get soonest, preferring stages on its host.

        Those come first because their fast transfers would otherwise wait behind slow ones. Then the stage counts
        whose sources are asked for the least part of what they have to send, per layer that this sink still lacks.
        """

        def wait(stage: Hashable) -> tuple[bool, float, int]:
            layer, count = self._layers[sink.layers[stage][0]], len(sink.layers[stage])
            sources = layer.wire[sink.number]
            bits = list(map(self._bits.__getitem__, sources))
            asked, to_send = sum(map(self.asked.__getitem__, bits)), sum(map(self.to_send.__getitem__, bits))
            return sink.near.isdisjoint(sources), asked / to_send / count if to_send else 0.0, -count

        stage = min(sink.layers, key=wait)
        layer = sink.layers[stage].popleft()
        if not sink.layers[stage]:
            del sink.layers[stage]
        sink.num_layers -= 1
        return layer

    def begin_layer(self, i: int) -> Iterator[Transfer]:
        """Let a sink that lacks nothing of its layer begin another; yield what it has beside it."""
        sink = self.sinks[i]
        while sink.layers and not sink.needs:
            layer = self._layers[self.next_layer(sink)]
            for source, blocks in layer.local.get(sink.number, ()):
                yield from (Transfer(source, sink.number, True, block) for block in blocks)
            sink.blocks = {self._bits[source]: blocks for source, blocks in layer.wire[sink.number].items()}
            for bit, blocks in sink.blocks.items():
                sink.needs |= 1 << bit
                self.wanted[bit] |= 1 << i
                self.asked[bit] += sink.seconds(self.sources[bit], _size(blocks))

    def pairs(self, done: Sequence[int], idle: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Choose which transfers begin, as (sink, source), after some sinks are done and some sources idle.

        Sinks that have most layers left choose first.
        """
        for i in sorted(done, key=lambda i: -self.sinks[i].num_layers):
            if able := self.sinks[i].needs & self.free_sources:
                yield i, _next(able, self.sinks[i].turn)
        for bit in idle:
            if self.free_sources >> bit & 1 and (able := self.wanted[bit] & self.free_sinks):
                yield _next(able, self.turns[bit]), bit

    def take(self, i: int, bit: int, most_bytes: int) -> tuple[tuple[Block, ...], int]:
        """Begin the transfer of what a source has for a sink, at most `most_bytes` or a single block; return blocks and
        time.
        """
        sink = self.sinks[i]
        self.free_sources ^= 1 << bit
        self.free_sinks ^= 1 << i
        sink.turn, self.turns[bit] = bit + 1, i + 1
        blocks, count = sink.blocks[bit], 1
        size = blocks[0].num_bytes
        while count < len(blocks) and size + blocks[count].num_bytes <= most_bytes:
            size += blocks[count].num_bytes
            count += 1
        sink.blocks[bit] = blocks[count:]
        if count == len(blocks):
            sink.needs ^= 1 << bit
            self.wanted[bit] ^= 1 << i
        seconds = sink.seconds(self.sources[bit], size)
        self.asked[bit] -= seconds
        self.to_send[bit] -= seconds
        return blocks[:count], seconds


def in_order(layers: Sequence[Layer], sinks: Sequence[int]) -> Iterator[Transfer]:
    """Yield all transfers in the model's order, those of a sink from several sources side by side."""
    for layer in layers:
        shares = [(source, sink, True, blocks) for sink in sinks for source, blocks in layer.local.get(sink, ())]
        shares += [(source, sink, False, blocks) for sink in sinks for source, blocks in layer.wire[sink].items()]
        for i in range(max((len(share[-1]) for share in shares), default=0)):
            yield from (Transfer(*share[:-1], share[-1][i]) for share in shares if i < len(share[-1]))


def scheduled(
    layers: Sequence[Layer], sources: Sequence[int], sinks: Sequence[int], *, hosts: Hosts, block_bytes: int
) -> Iterator[Transfer]:
    """Yield all transfers by their time if each source sends one at a time and each sink receives one at a time.

    Sinks receive whole layers one after another, because engines hold back a layer's weights until it is complete. Sink
    i of n starts at i/n of the model. Free sinks choose among free sources, and free sources among free sinks, in turn,
    which soon lets them take turns without conflicts.
    """
    switch = _Switch(layers, sources, sinks, hosts)
    # When each transfer under way ends: (time, sink, source); at first every sink is free.
    ends: list[tuple[int, int, int]] = [(0, i, -1) for i in range(len(sinks))]
    while ends:
        now, done, idle = ends[0][0], list[int](), list[int]()
        while ends and ends[0][0] == now:
            _, i, bit = heapq.heappop(ends)
            done.append(i)
            switch.free_sinks |= 1 << i
            if bit >= 0:
                idle.append(bit)
                switch.free_sources |= 1 << bit
        for i in done:
            yield from switch.begin_layer(i)
        for i, bit in switch.pairs(done, idle):
            source, sink = sources[bit], sinks[i]
            blocks, seconds = switch.take(i, bit, block_bytes)
            for block in blocks:
                yield Transfer(source, sink, False, block)
            heapq.heappush(ends, (now + seconds, i, bit))


def _size(blocks: tuple[Block, ...]) -> int:
    # Most often a layer's part is a single block, and there are millions.
    return blocks[0].num_bytes if len(blocks) == 1 else sum(block.num_bytes for block in blocks)


def _next(bits: int, turn: int) -> int:
    """Return the first set bit from `turn` on, or else the first of all."""
    later = bits >> turn
    return turn + (later & -later).bit_length() - 1 if later else (bits & -bits).bit_length() - 1
