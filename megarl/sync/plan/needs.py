"""What all workers of an engine need, by one layer of each kind: layers of a kind differ in their number only."""

from dataclasses import replace

from megarl.sync.plan.assign import Holding
from megarl.sync.plan.engine_shards import EnginePosition, engine_shards
from megarl.weights.boxes import Box
from megarl.weights.families import ModelSpec

_LAYER = "model.layers.{}."


def engine_needs(spec: ModelSpec, size: int, *, expert_parallel: bool = False) -> list[Holding]:
    """Of each of `size` workers, as `engine_shards` says of one; equal, but in another order of tensors."""
    first = {spec.dims.kind_of(layer): layer for layer in reversed(range(spec.dims.num_layers))}
    # Short, yet with a layer of every kind at its own place.
    short = replace(spec, dims=replace(spec.dims, num_layers=max(first.values()) + 1))
    positions = (EnginePosition(rank=i, size=size, expert_parallel=expert_parallel) for i in range(size))
    layers = [first[spec.dims.kind_of(layer)] for layer in range(spec.dims.num_layers)]
    return [_repeated(engine_shards(short, position), layers) for position in positions]


def _repeated(shards: dict[str, Box], layers: list[int]) -> Holding:
    """layers: of each layer the one in `shards` that is like it."""
    parts: dict[int, list[tuple[str, Box]]] = {like: [] for like in layers}
    repeated = {}
    for name, box in shards.items():
        like = next((like for like in parts if name.startswith(_LAYER.format(like))), None)
        if like is not None:
            parts[like].append((name.removeprefix(_LAYER.format(like)), box))
        elif not name.startswith(_LAYER.split("{")[0]):
            repeated[name] = box
    for layer, like in enumerate(layers):
        prefix = _LAYER.format(layer)
        repeated.update((prefix + name, box) for name, box in parts[like])
    return repeated
