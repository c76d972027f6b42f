"""Order what engine workers receive: each starts at another part of the model, and wraps around at its end.

In the model's own order, all workers would first need weights of the first pipeline stage. Its ranks would be the
bottleneck, while the ranks of other stages would be idle.
"""

import bisect
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megarl.sync.plan.assign import Holding, Transfer, layer_of
from megarl.weights.safetensors_map import TensorSpec


class _Place(NamedTuple):
    """A tensor's position in bytes: where its layer begins, the layer's size, and the tensor's offset in the layer.

    Tensors outside layers, such as embeddings, count as layers of size 0, so that their order is kept.
    """

    layer: int
    size: int
    within: int


def staggered(
    transfers: Iterable[Transfer],
    specs: Mapping[str, TensorSpec],
    held: Mapping[int, Holding],
    needed: Mapping[int, Holding],
) -> Iterable[Transfer]:
    """Sort transfers by their time if all sinks received at equal rates, sink i of n starting at i/n of the model.

    A sink receives whole layers one after another, because engines hold back a layer's weights until it is complete.
    Within each layer sinks also start at different tensors, because its experts are on different ranks. If every source
    holds part of every tensor, staggering gains nothing, and the order stays.
    """
    if all(len(holding) == len(specs) for holding in held.values()):
        return transfers
    places, total = _places(specs), sum(spec.num_bytes for spec in specs.values())
    layers = sorted({place.layer for place in places.values()})
    # For each sink, the layer that it begins with, and the part of every layer that it gets last.
    begins = dict[int, tuple[int, float]]()
    for i, sink in enumerate(needed):
        begin = i * total / len(needed)
        after = bisect.bisect_right(layers, begin)
        first, end = [*layers, total][after - 1 : after + 1]
        begins[sink] = first, (begin - first) / (end - first)

    def time(transfer: Transfer) -> int:
        layer, size, within = places[transfer.run.tensors[0]]
        first, last = begins[transfer.sink]
        return (layer - first) % total + ((within - int(last * size)) % size if size else within)

    return sorted(transfers, key=time)


def _places(specs: Mapping[str, TensorSpec]) -> dict[str, _Place]:
    places, first = dict[str, _Place](), 0
    for layer, names in itertools.groupby(specs, layer_of):
        within, size = dict[str, int](), 0
        for name in names:
            within[name] = size
            size += specs[name].num_bytes
        places |= {name: _Place(first, size if layer else 0, before) for name, before in within.items()}
        first += size
    return places
