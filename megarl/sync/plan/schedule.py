"""Order what ranks send, so that all of them always send and all engine workers always receive.

In the model's own order, all workers would first need weights of the first pipeline stage. Its ranks would be the
bottleneck, while those of other stages would be idle. Each worker therefore starts at another layer, and within a layer
it takes what a free rank has. This is the scheduling of an input-queued switch: a transfer begins as soon as its source
and its receiver are both free, and ends after a time proportional to its bytes.
"""

import bisect
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from megarl.sync.plan.assign import Block, Hosts, Layer

# Source, receiver, whether they share memory, a number of the layer that the receiver gets no other of, and what is
# sent.
Transfer: TypeAlias = tuple[int, int, bool, int, Block]
# How much longer a byte takes between hosts (400 Gb/s) than within one (NVLink 4, 450 GB/s).
_BETWEEN_HOSTS = 9
# This many sources of a layer stand for all of them: a stage has up to hundreds, and they are asked for alike.
_SAMPLE = 8


class _Stage:
    """The layers that the same sources hold; left: how many of them receivers still lack, each counted once per
    receiver.
    """

    __slots__ = ("holders", "left")

    def __init__(self, holders: frozenset[int]) -> None:
        self.holders, self.left = holders, 0


class _Receiver:
    """The parts that a receiver still lacks: the layers of each stage, and of its present one the blocks of each
    source.

    near: the sources on its host. totals: the layers from stages on its host, and from others, that it lacked at the
    beginning. bit: this receiver in sets of receivers. needs: the sources that have blocks for it now, as
    bits; after: those that come after the last one that sent.
    """

    __slots__ = ("after", "bit", "layers", "near", "needs", "num_layers", "number", "shares", "totals")

    def __init__(self, number: int, near: frozenset[int], *, bit: int, first: int) -> None:
        self.number, self.near, self.bit, self.needs, self.after = number, near, bit, 0, -1 << first
        self.layers, self.num_layers = dict[_Stage, deque[Layer]](), 0
        self.shares, self.totals = dict[int, tuple[Block, ...]](), (0, 0)


class _Switch:
    """The state of all transfers. Sets of processes are bits of an integer: a source's is that of its number, a
    receiver's that of its position.

    wanted: the receivers that lack something from each source now; after: those that come after the last one it served.
    """

    def __init__(self, layers: Sequence[Layer], sources: Sequence[int], receivers: Sequence[int], hosts: Hosts) -> None:
        self.wanted, self.after = dict.fromkeys(sources, 0), dict.fromkeys(sources, -1)
        self.free_sources, self.free_receivers = sum(1 << source for source in sources), 0
        stages = {layer.holders: _Stage(layer.holders) for layer in layers}
        on = defaultdict[object, list[int]](list)
        for source in sources:
            on[hosts.get(source)].append(source)
        near = {host: frozenset(those) for host, those in on.items()}
        begins = list(itertools.accumulate((layer.size for layer in layers), initial=0))
        self.receivers = list[_Receiver]()
        for i, number in enumerate(receivers):
            first = sources[i * len(sources) // len(receivers)]
            receiver = _Receiver(number, near.get(hosts.get(number), frozenset()), bit=1 << i, first=first)
            begin = min(bisect.bisect_right(begins, i * begins[-1] // len(receivers)), len(layers)) - 1
            for layer in itertools.chain(layers[begin:], layers[:begin]):
                stage = stages[layer.holders]
                stage.left += 1
                receiver.layers.setdefault(stage, deque()).append(layer)
            receiver.num_layers, receiver.totals = len(layers), _num_near_and_far(receiver)
            self.receivers.append(receiver)

    def next_layer(self, receiver: _Receiver) -> Layer:
        """Choose the stage whose next layer a receiver would get soonest.

        Layers of stages on its host come evenly among the others, so that links within and between hosts work at the
        same time. Then the stage counts for whose sources the fewest receivers wait, as a part of what is left to send,
        per layer that this receiver lacks.
        """
        waiting_for = self.wanted.__getitem__
        near, far = _num_near_and_far(receiver)
        wants_near = near * receiver.totals[1] >= far * receiver.totals[0]

        def wait(item: tuple[_Stage, deque[Layer]]) -> tuple[bool, float, int]:
            stage, layers = item
            some = list(itertools.islice(layers[0].remote[receiver.number], _SAMPLE))
            waiting = sum(map(int.bit_count, map(waiting_for, some))) / max(1, len(some))
            return receiver.near.isdisjoint(some) is wants_near, waiting / stage.left / len(layers), -len(layers)

        stage, layers = min(receiver.layers.items(), key=wait)
        layer = layers.popleft()
        stage.left -= 1
        receiver.num_layers -= 1
        if not layers:
            del receiver.layers[stage]
        return layer

    def begin_layer(self, receiver: _Receiver) -> Iterator[Transfer]:
        """Let a receiver that lacks nothing of its layer begin another; yield what it has beside it."""
        number, bit, wanted = receiver.number, receiver.bit, self.wanted
        while receiver.layers and not receiver.needs:
            layer = self.next_layer(receiver)
            for source, blocks in layer.local.get(number, {}).items():
                yield from ((source, number, True, receiver.num_layers, block) for block in blocks)
            receiver.shares = dict(layer.remote[number])
            for source in receiver.shares:
                wanted[source] |= bit
            receiver.needs = sum(map((1).__lshift__, receiver.shares))

    def pairs(self, ended: Sequence[tuple[_Receiver, int]]) -> Iterator[tuple[int, _Receiver]]:
        """Choose which transfers begin, as (source, receiver), after others ended; first receivers with most left."""
        for receiver, _ in sorted(ended, key=lambda each: -each[0].num_layers):
            if able := receiver.needs & self.free_sources:
                able = able & receiver.after or able
                yield (able & -able).bit_length() - 1, receiver
        for _, source in ended:
            if self.free_sources >> source & 1 and (able := self.wanted[source] & self.free_receivers):
                able = able & self.after[source] or able
                yield source, self.receivers[(able & -able).bit_length() - 1]

    def take(self, source: int, receiver: _Receiver) -> Block:
        """Begin the transfer of the next block that a source has for a receiver."""
        bit, blocks = 1 << source, receiver.shares[source]
        self.free_sources ^= bit
        self.free_receivers ^= receiver.bit
        receiver.after, self.after[source] = -bit << 1, -receiver.bit << 1
        if len(blocks) > 1:
            receiver.shares[source] = blocks[1:]
        else:
            receiver.needs ^= bit
            self.wanted[source] ^= receiver.bit
        return blocks[0]


def _num_near_and_far(receiver: _Receiver) -> tuple[int, int]:
    """Count the layers that a receiver lacks from stages on its host, and from others."""
    near = sum(
        len(each) for each in receiver.layers.values() if not receiver.near.isdisjoint(each[0].remote[receiver.number])
    )
    return near, sum(map(len, receiver.layers.values())) - near


def in_order(layers: Iterable[Layer], receivers: Sequence[int]) -> Iterator[Transfer]:
    """Yield all transfers in the model's order, those of a receiver from several sources side by side."""
    for number, layer in enumerate(layers):
        shares = [
            (source, receiver, local, blocks)
            for local, by_receiver in ((True, layer.local), (False, layer.remote))
            for receiver in receivers
            for source, blocks in by_receiver.get(receiver, {}).items()
        ]
        for i in range(max((len(share[3]) for share in shares), default=0)):
            yield from ((*share[:3], number, share[3][i]) for share in shares if i < len(share[3]))


def scheduled(
    layers: Sequence[Layer], sources: Sequence[int], receivers: Sequence[int], *, hosts: Hosts
) -> Iterator[Transfer]:
    """Yield all transfers in the order of their starts: each source and each receiver takes part in one at a time.

    Receivers take whole layers one after another, because engines hold back a layer's weights until it is complete.
    Receiver i of n starts at i/n of the model. Free receivers choose among free sources, and free sources among free
    receivers, in turn, which soon lets them take turns without conflicts.
    """
    switch = _Switch(layers, sources, receivers, hosts)
    # The transfers under way, by the time when they end; at the beginning every receiver is through with nothing.
    ends, times = defaultdict[int, list[tuple[_Receiver, int]]](list), [0]
    ends[0] = [(receiver, sources[0]) for receiver in switch.receivers]
    while times:
        now = heapq.heappop(times)
        ended = ends.pop(now)
        for receiver, source in ended:
            switch.free_sources |= 1 << source
            switch.free_receivers |= receiver.bit
            if not receiver.needs:
                yield from switch.begin_layer(receiver)
        for source, receiver in switch.pairs(ended):
            block = switch.take(source, receiver)
            yield source, receiver.number, False, receiver.num_layers, block
            end = now + (block.num_bytes if source in receiver.near else block.num_bytes * _BETWEEN_HOSTS)
            if end not in ends:
                heapq.heappush(times, end)
            ends[end].append((receiver, source))
