"""Compute where a parallel layout puts ranks, layers and parameters, by arithmetic alone, before any process starts."""

import math
from collections import Counter
from dataclasses import dataclass, replace

from megarl.config.lora import LoraConfig
from megarl.config.schema import LayoutConfig
from megarl.weights.adapters import adapter_spec
from megarl.weights.families import ModelSpec
from megarl.weights.tables import VALUE_HEAD, Layers, Partition, WeightRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's coordinates in a parallel layout. Consecutive ranks differ in tp first, then in cp, dp and pp."""

    tp: int
    cp: int
    dp: int
    pp: int


def place_of(layout: LayoutConfig, rank: int) -> Place:
    """Return the coordinates (tp, cp, dp, pp) of a global rank."""
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return Place(tp=tp, cp=cp, dp=dp, pp=pp)


def groups_of(layout: LayoutConfig, axis: str) -> list[list[int]]:
    """List every process group along an axis (`tp`, `cp`, `dp` or `pp`), each as global ranks in ascending order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = place_of(layout, rank)
        others = tuple(getattr(place, name) for name in ("tp", "cp", "dp", "pp") if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def num_stage_layers(layout: LayoutConfig, num_layers: int) -> list[int]:
    """Return the number of layers of every pipeline stage, over all its virtual chunks."""
    return [sum(counts) for counts in zip(*layout.chunk_layers(num_layers), strict=True)]


def padded_vocab(vocab: int, layout: LayoutConfig, vocab_multiple: int) -> int:
    """Return the vocabulary size, padded to a multiple of vocab_multiple · tp."""
    multiple = vocab_multiple * layout.tp
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class NumParameters:
    """A rank's numbers of parameters: those of experts, and all others."""

    others: int
    experts: int

    @property
    def total(self) -> int:
        return self.others + self.experts


def num_trained_parameters(
    spec: ModelSpec,
    layout: LayoutConfig,
    stage: int,
    *,
    vocab_multiple: int,
    scalar_head: bool = False,
    lora: LoraConfig | None = None,
) -> NumParameters:
    """Count the parameters that each rank of a pipeline stage trains: adapters, or all but a tower's frozen ones."""
    if lora is not None:
        spec = adapter_spec(spec, lora)
    elif spec.tower is not None:
        spec = replace(spec, tower=replace(spec.tower, rules=spec.tower.trained))
    return num_stage_parameters(spec, layout, stage, vocab_multiple=vocab_multiple, scalar_head=scalar_head)


def num_stage_parameters(
    spec: ModelSpec, layout: LayoutConfig, stage: int, *, vocab_multiple: int, scalar_head: bool = False
) -> NumParameters:
    """Count the parameters on each rank of a pipeline stage.

    The embedding and a vision tower are on the first stage; the final norm and the head are on the last. Tied
    embeddings need a copy on the last stage unless it is also the first. Replicated parameters, such as a tower's,
    count in full on every tensor-parallel rank. Expert parallelism splits a layer's experts over ranks, and expert
    tensor parallelism splits each expert.
    """
    counts, sizes = [0, 0], {"vocab": padded_vocab(spec.dims.vocab, layout, vocab_multiple)}
    kinds = Counter(map(spec.dims.kinds_of, stage_layers(layout, spec.dims.num_layers, stage)))
    for rule in (*spec.family.weights, *(spec.tower.rules if spec.tower is not None else ())):
        names, of_expert = rule.names[0], "{expert}" in rule.names[0]
        size = sum(math.prod(sizes.get(s) or spec.dims.dim(s) for s in tensor.shape) for tensor in rule.tensors)
        if of_expert:
            size = num_local_experts(spec, layout) * size // layout.etp
        elif rule.partition is not Partition.REPLICATED:
            size //= layout.tp
        if "{layer}" in names:
            counts[of_expert] += size * sum(n for each, n in kinds.items() if rule.layers in (Layers.ALL, *each))
        elif is_on_stage(rule, spec, layout, stage, scalar_head):
            counts[of_expert] += size
    return NumParameters(others=counts[0], experts=counts[1])


def num_local_experts(spec: ModelSpec, layout: LayoutConfig) -> int:
    """Return how many of a layer's experts each rank holds, or 0 for a dense model."""
    return spec.dims.dim("experts") // layout.ep


def stage_layers(layout: LayoutConfig, num_layers: int, stage: int) -> list[int]:
    """List the layers of a pipeline stage. Under virtual pipelining, its chunk c is the (c·pp + stage)-th block."""
    layers, first = list[int](), 0
    for counts in layout.chunk_layers(num_layers):
        before = first + sum(counts[:stage])
        layers += range(before, before + counts[stage])
        first += sum(counts)
    return layers


def is_on_stage(rule: WeightRule, spec: ModelSpec, layout: LayoutConfig, stage: int, scalar_head: bool) -> bool:
    if rule.is_embedding or rule.is_of_tower:
        return stage == 0
    if stage != layout.pp - 1:
        return False
    if rule.tensors[0].name == VALUE_HEAD:
        return scalar_head
    if rule.names[0].startswith("output_layer."):
        return not scalar_head and not (spec.is_copy(rule) and layout.pp == 1)
    return True
