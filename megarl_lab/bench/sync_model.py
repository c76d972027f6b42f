"""The model that megarl_lab.bench.sync moves between four ranks, and what each rank holds and wants of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.sync.plan.assign import Holding, best_neighbours, overlaps
from megarl.weights.boxes import Box, slices_of
from megarl.weights.safetensors_map import TensorSpec

NUM_RANKS = 4
# Name → shape in units of the width, and the axis that tensor parallelism splits.
LAYER = {"qkv": ((3, 1), 0), "proj": ((1, 1), 1), "fc1": ((4, 1), 0), "fc2": ((1, 4), 1)}
_ELEMENTS = sum(rows * columns for (rows, columns), _ in LAYER.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Tensor-parallel groups of ranks, in their order; with `stages`, the n-th group has the n-th part of the layers,
    else every group has all of them.
    """

    groups: tuple[tuple[int, ...], ...]
    stages: bool = False

    @property
    def tp(self) -> int:
        return len(self.groups[0])

    def group_of(self, rank: int) -> int:
        return next(i for i, group in enumerate(self.groups) if rank in group)

    def holders(self, layer: int, num_layers: int) -> Sequence[tuple[int, ...]]:
        """The groups that have a layer."""
        return [self.groups[layer * len(self.groups) // num_layers]] if self.stages else self.groups


_TP4, _TP2 = RankLayout(groups=((0, 1, 2, 3),)), RankLayout(groups=((0, 1), (2, 3)))
_PP2 = RankLayout(groups=((0, 1), (2, 3)), stages=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCase:
    """From a layout to a layout; `overlapping`: receivers sit where they overlap most with sources, else in order."""

    source: RankLayout
    receiver: RankLayout
    overlapping: bool = False


CASES = {
    "TP4 → 2 × TP2, overlapping": SyncCase(source=_TP4, receiver=_TP2, overlapping=True),
    "TP4 → 2 × TP2, in order": SyncCase(source=_TP4, receiver=_TP2),
    "2 × TP2 → TP4, in order": SyncCase(source=_TP2, receiver=_TP4),
    "PP2 × TP2 → 2 × TP2, in order": SyncCase(source=_PP2, receiver=_TP2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """All tensors, and where each rank's shards lie in them before and after."""

    specs: Mapping[str, TensorSpec]
    axes: Mapping[str, int]
    layers: Mapping[str, int]
    source: RankLayout
    receiver: RankLayout

    @property
    def num_layers(self) -> int:
        return len(self.specs) // len(LAYER)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs.values())

    def held(self, rank: int) -> dict[str, Box]:
        return self._boxes(self.source, rank)

    def wanted(self, rank: int) -> dict[str, Box]:
        return self._boxes(self.receiver, rank)

    def _boxes(self, layout: RankLayout, rank: int) -> dict[str, Box]:
        group = layout.groups[layout.group_of(rank)]
        names = (n for n in self.specs if group in layout.holders(self.layers[n], self.num_layers))
        return {name: self.box(name, group.index(rank), len(group)) for name in names}

    def box(self, name: str, place: int, count: int) -> Box:
        """The `place`-th of `count` equal parts of a tensor."""
        shape, axis = self.specs[name].shape, self.axes[name]
        length = shape[axis] // count
        return tuple((place * length, (place + 1) * length) if i == axis else (0, n) for i, n in enumerate(shape))


def one_each(boxes: Mapping[str, Box]) -> Holding:
    """Return what a process holds or needs if it is one box of each tensor."""
    return {name: (box,) for name, box in boxes.items()}


def make_model(case: str, width: int, num_layers: int) -> Model:
    """A case's model of `num_layers` layers of 12 × width² float32 parameters."""
    specs, axes, layers = dict[str, TensorSpec](), dict[str, int](), dict[str, int]()
    for layer in range(num_layers):
        for kind, (units, axis) in LAYER.items():
            name = f"layers.{layer}.{kind}"
            specs[name] = TensorSpec(shape=tuple(width * unit for unit in units), dtype=torch.float32)
            axes[name], layers[name] = axis, layer
    chosen = CASES[case]
    model = Model(specs=specs, axes=axes, layers=layers, source=chosen.source, receiver=chosen.receiver)
    if not chosen.overlapping:
        return model
    held, wanted = ({rank: one_each(of(rank)) for rank in range(NUM_RANKS)} for of in (model.held, model.wanted))
    # Sink i of the layout in order goes to the rank that it overlaps most with.
    slots = best_neighbours(overlaps(specs, held, wanted))
    groups = tuple(tuple(slots[receiver] for receiver in group) for group in chosen.receiver.groups)
    return Model(specs=specs, axes=axes, layers=layers, source=chosen.source, receiver=RankLayout(groups=groups))


def model_sizes(num_bytes: int, num_layers: int) -> int:
    """The width, a multiple of 16, whose model of that many layers comes closest to a size."""
    return round((num_bytes / (4 * _ELEMENTS * num_layers)) ** 0.5 / 16) * 16


def shards(model: Model, rank: int) -> dict[str, torch.Tensor]:
    """Return what a rank holds."""
    return dict(_cut(model, model.held(rank)))


def check(model: Model, rank: int, got: Mapping[str, torch.Tensor], added: float) -> None:
    """Raise AssertionError unless a rank has what it wants, every element `added` larger than it was made."""
    for name, shard in _cut(model, model.wanted(rank)):
        assert torch.equal(got[name], shard + added), f"{name} arrived wrong"


def _cut(model: Model, boxes: Mapping[str, Box]) -> Iterator[tuple[str, torch.Tensor]]:
    """Boxes of full tensors in which every position has a value of its own."""
    numbers = {name: i for i, name in enumerate(model.specs)}
    for name, box in boxes.items():
        generator = torch.Generator().manual_seed(numbers[name])
        full = torch.randint(-(1 << 20), 1 << 20, model.specs[name].shape, generator=generator, dtype=torch.int32)
        yield name, full.to(torch.float32)[slices_of(box)].clone()
