"""Compute vLLM's weight layout: the boxes (rectangular parts) of Hugging Face tensors that an engine worker needs."""

import itertools
from dataclasses import replace

from megarl.sync.plan.assign import Holding
from megarl.weights.boxes import Boxes, joined
from megarl.weights.families import ModelSpec
from megarl.weights.slices import Split, shard_boxes
from megarl.weights.tables import Partition, WeightRule

# vLLM pads the vocabulary to a multiple of this, then splits it (DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


def engine_needs(spec: ModelSpec, size: int, *, stages: int = 1, expert_parallel: bool = False) -> list[Holding]:
    """Return, for each worker of an engine, the boxes (rectangular parts) of each tensor that it needs.

    size: workers of a pipeline stage, which share its tensors. stages: pipeline stages; the workers of the first come
    first, as in vLLM. expert_parallel: whether each expert is whole on one worker.

    A tensor is split as its weight rule says, the vocabulary after padding. With fewer key/value heads than workers,
    several workers have the same head.
    """
    needs: list[list[dict[str, Boxes]]] = [[{} for _ in range(size)] for _ in range(stages)]
    expected, experts = spec.expected_tensors(by_expert=True), expert_ranges(spec.dims.dim("experts"), size)
    # By a rule's names, the boxes in each worker's tensors. They are the same for all layers and experts.
    boxes = dict[tuple[str, ...], list[dict[str, Boxes]]]()
    stage_of = {layer: stage for stage in range(stages) for layer in stage_range(spec.dims.num_layers, stage, stages)}
    for placed in spec.rules():
        if spec.is_copy(placed.rule):
            continue
        is_whole = placed.expert is not None and expert_parallel
        if (key := placed.rule.names) not in boxes:
            rule = replace(placed.rule, partition=Partition.REPLICATED) if is_whole else placed.rule
            splits = [Split(rank, size, VOCAB_PADDING, repeats_heads=True) for rank in range(size)]
            boxes[key] = [_boxes_by_tensor(rule, spec, split) for split in splits]
        on_stages = _end_stages(placed.rule, spec, stages) if placed.layer is None else [stage_of[placed.layer]]
        ranks = [rank for rank in range(size) if not is_whole or placed.expert in experts[rank]]
        for stage, rank in itertools.product(on_stages, ranks):
            holding = needs[stage][rank]
            for pattern, its in boxes[key][rank].items():
                if (name := placed.name(pattern)) in expected:
                    holding[name] = joined((*holding[name], *its)) if name in holding else its
    return list(itertools.chain(*needs))


def _boxes_by_tensor(rule: WeightRule, spec: ModelSpec, split: Split) -> dict[str, Boxes]:
    """Return the boxes of a rule's tensors, by their names in the rule."""
    found = list(zip(rule.tensors, shard_boxes(rule, spec.dims, split, by_expert=True), strict=True))
    return {
        tensor.sent_name: joined(box for other, box in found if other.sent_name == tensor.sent_name)
        for tensor in rule.tensors
    }


def expert_ranges(num_experts: int, size: int) -> list[range]:
    """Return the experts that each worker has whole; if they do not divide evenly, the first workers have one more."""
    count, more = divmod(num_experts, size)
    ends = list(itertools.accumulate([count + (rank < more) for rank in range(size)], initial=0))
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def stage_range(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a pipeline stage of vLLM: those that do not divide evenly go to stages before the last."""
    count, more = divmod(num_layers, num_stages)
    sizes = [count + (num_stages - 1 - more <= i < num_stages - 1) for i in range(num_stages)]
    return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


def _end_stages(rule: WeightRule, spec: ModelSpec, num_stages: int) -> list[int]:
    """Return the stages that have a parameter of no layer: the embedding, the last norm, the head or a tower's."""
    if spec.family.ends_on_every_stage or rule.is_of_tower:
        return list(range(num_stages))
    if not rule.is_embedding:
        return [num_stages - 1]
    # A tied head is computed with the embedding.
    return sorted({0, num_stages - 1} if spec.dims.tied else {0})
