"""Order what engine workers receive, so that each begins with another part of the model and goes around.

In the model's own order all sinks would at first want what the first stage holds, whose ranks have to serve all of them
while the others have nothing to do.
"""

import bisect
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megarl.sync.plan.assign import Holding, Transfer, layer_of
from megarl.weights.safetensors_map import TensorSpec


class _Place(NamedTuple):
    """A tensor's place in bytes: where its layer begins, the size of that layer, and the tensor's offset in the layer.

    What stands between layers, such as embeddings, counts as a layer of size 0: it keeps its order.
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
    """Sort transfers by when they would come if all sinks received evenly, the i-th of n from i/n of the model on.

    A sink gets whole layers one after another, since engines hold back what they have of a layer until it is whole;
    but it begins elsewhere within each of them, as experts of a layer are on different ranks. Where every source has
    something of every tensor there is nothing to gain, and the model's order stays.
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
