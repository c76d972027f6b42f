"""Compute vLLM's weight layout: the boxes (rectangular parts) of Hugging Face tensors that an engine worker needs."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

from megarl.sync.plan.assign import Holding
from megarl.weights.boxes import Box, Boxes, joined
from megarl.weights.families import ModelSpec
from megarl.weights.slices import Split, shard_boxes
from megarl.weights.tables import Partition

# vLLM pads the vocabulary to a multiple of this, then splits it (DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64
_LAYER = "model.layers.{}."
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePosition:
    """A worker's rank in its vLLM engine. expert_parallel: whether each expert is whole on one worker."""

    rank: int
    size: int
    expert_parallel: bool = False

    def holds_expert(self, expert: int | None, num_experts: int) -> bool:
        """Return whether this worker holds (part of) an expert. If experts do not divide evenly, the first workers
        have one more.
        """
        if expert is None or not self.expert_parallel:
            return True
        count, more = divmod(num_experts, self.size)
        start = self.rank * count + min(self.rank, more)
        return start <= expert < start + count + (self.rank < more)


def engine_shards(spec: ModelSpec, at: EnginePosition) -> dict[str, Boxes]:
    """Return, for each tensor of which an engine worker needs a part, the boxes (rectangular parts) that it needs.

    Norms and routers are whole. q, k, v, gate and up are split by output features, o and down by input features, and
    the vocabulary by rows after padding. With fewer key/value heads than workers, several workers have the same head.
    """
    expected, split = spec.expected_tensors(), Split(at.rank, at.size, VOCAB_PADDING, repeats_heads=True)
    shards = defaultdict[str, list[Box]](list)
    for placed in spec.rules():
        if spec.is_copy(placed.rule) or not at.holds_expert(placed.expert, spec.dims.dim("experts")):
            continue
        whole = placed.expert is not None and at.expert_parallel
        rule = replace(placed.rule, partition=Partition.REPLICATED) if whole else placed.rule
        for tensor, box in zip(rule.tensors, shard_boxes(rule, spec.dims, split), strict=True):
            if (name := placed.name(tensor.name)) in expected:
                shards[name].append(box)
    return {name: joined(boxes) for name, boxes in shards.items()}


def stage_range(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a pipeline stage of vLLM: those that do not divide evenly go to stages before the last."""
    count, more = divmod(num_layers, num_stages)
    sizes = [count + (num_stages - 1 - more <= i < num_stages - 1) for i in range(num_stages)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def _is_at_end(name: str, spec: ModelSpec, stage: int, num_stages: int) -> bool:
    """Return whether a stage has a tensor that belongs to no layer: the vocabulary, the last norm or the head."""
    if spec.family.ends_on_every_stage:
        return True
    if name == _EMBEDDING:
        return stage == 0 or (spec.dims.tied and stage == num_stages - 1)
    return stage == num_stages - 1


def engine_needs(spec: ModelSpec, size: int, *, stages: int = 1, expert_parallel: bool = False) -> list[Holding]:
    """Compute `engine_shards` for each of an engine's workers, in another order of tensors.

    size: workers of a pipeline stage, which share its tensors. stages: pipeline stages; the workers of the first come
    first, as in vLLM. It is faster than a call per worker, because it computes one dense and one expert layer and
    repeats them.
    """
    first = {spec.dims.kind_of(layer): layer for layer in reversed(range(spec.dims.num_layers))}
    # A shortened model that still has a layer of every kind at its original index.
    short = replace(spec, dims=replace(spec.dims, num_layers=max(first.values()) + 1))
    # For each layer, the layer of the short model that is of the same kind.
    layers = [first[spec.dims.kind_of(layer)] for layer in range(spec.dims.num_layers)]
    needs: list[list[Holding]] = [[] for _ in range(stages)]
    for rank in range(size):
        parts: dict[int, list[tuple[str, Boxes]]] = {like: [] for like in layers}
        ends = {}
        shards = engine_shards(short, EnginePosition(rank=rank, size=size, expert_parallel=expert_parallel))
        for name, boxes in shards.items():
            like = next((like for like in parts if name.startswith(_LAYER.format(like))), None)
            if like is not None:
                parts[like].append((name.removeprefix(_LAYER.format(like)), boxes))
            elif not name.startswith(_LAYER.split("{")[0]):
                ends[name] = boxes
        for stage, its in enumerate(needs):
            repeated = {name: boxes for name, boxes in ends.items() if _is_at_end(name, spec, stage, stages)}
            for layer in stage_range(spec.dims.num_layers, stage, stages):
                repeated.update((_LAYER.format(layer) + name, boxes) for name, boxes in parts[layers[layer]])
            its.append(repeated)
    return list(itertools.chain(*needs))
