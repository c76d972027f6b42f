"""What a layout's ranks hold, in the coordinates of Hugging Face tensors, and what the bridge then moves per sync."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.cluster.placement import devices_per_node, ranks_in_order
from megarl.config.schema import Config, LayoutConfig
from megarl.sync.plan.build import Holding, Plan, build_plan
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.plan.neighbours import best_neighbours, overlaps
from megarl.sync.wire.casts import wire_specs
from megarl.weights.boxes import Box
from megarl.weights.families import ModelSpec, PlacedRule
from megarl.weights.safetensors_map import TensorSpec, weight_specs
from megarl.weights.shards import is_on_stage, num_local_experts, stage_layers
from megarl.weights.slices import Split, split_box


def rank_holdings(spec: ModelSpec, layout: LayoutConfig, *, vocab_multiple: int) -> list[dict[str, Box]]:
    """Of every rank, tensor → box; what ranks say of themselves (`PolicyWorker.held_weights`), without a model."""
    holdings: list[dict[str, Box]] = [{} for _ in range(layout.world_size)]
    shapes = spec.expected_tensors()
    layers = [frozenset(stage_layers(layout, spec.dims.num_layers, stage)) for stage in range(layout.pp)]
    for placed in spec.rules():
        stages = [stage for stage in range(layout.pp) if _holds(spec, layout, stage, placed, layers[stage])]
        for part, tensor in enumerate(placed.rule.tensors):
            copied = placed.rule.tied_to if spec.is_copy(placed.rule) else None
            name = placed.name(copied or tensor.name)
            for rank, split in _shards(spec, layout, stages, placed, vocab_multiple) if name in shapes else ():
                holdings[rank][name] = split_box(placed.rule.partition, shapes[name], part, spec.dims, split)
    return holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What travels, what every rank holds of it, and what each worker of an engine needs."""

    specs: Mapping[str, TensorSpec]
    held: Sequence[Holding]
    needs: Sequence[Holding]


def ends_of(config: Config, spec: ModelSpec) -> Ends:
    """Both ends of a run's bridge."""
    return Ends(
        specs=wire_specs(spec, weight_specs(spec, config.model.dtype), config.sync.dtype),
        held=rank_holdings(spec, config.actor.layout, vocab_multiple=config.model.vocab_multiple),
        needs=engine_needs(spec, config.rollout.engine.tp),
    )


def engine_ranks(config: Config, ends: Ends) -> list[tuple[int, ...]]:
    """Of each colocated engine the ranks whose devices its workers use, so that least has to travel.

    An engine stays on its node. In order where nothing is better.
    """
    seats = ranks_in_order(config.rollout.engine)
    per_node = devices_per_node(config.placement.trainer, config.actor.layout.world_size)
    shared = overlaps(ends.specs, dict(enumerate(ends.held)), dict(enumerate(ends.needs)))
    chosen = list[tuple[int, ...]]()
    for node, group in itertools.groupby(seats, key=lambda ranks: ranks[0] // per_node):
        here, first = list(group), node * per_node
        in_order = [rank - first for ranks in here for rank in ranks]
        gains = np.tile(shared[:, first : first + per_node], (len(here), 1))
        best, each = best_neighbours(gains), np.arange(len(gains))
        if gains[each, best].sum() == gains[each, in_order].sum():
            best = in_order
        tp = len(ends.needs)
        chosen += [tuple(rank + first for rank in best[i : i + tp]) for i in range(0, len(best), tp)]
    return chosen


def bridge_plan(config: Config, spec: ModelSpec) -> Plan:
    """The plan that the engines of a run get their weights by; sinks count on from the last rank."""
    ends, tp, first = ends_of(config, spec), config.rollout.engine.tp, config.actor.layout.world_size
    colocated = config.placement.mode == "colocated"
    workers = [rank for ranks in engine_ranks(config, ends) for rank in ranks] if colocated else []
    return build_plan(
        ends.specs,
        dict(enumerate(ends.held)),
        {first + i: ends.needs[i % tp] for i in range(config.rollout.engine.num_engines * tp)},
        neighbours={first + i: [rank] for i, rank in enumerate(workers)},
    )


def _holds(spec: ModelSpec, layout: LayoutConfig, stage: int, placed: PlacedRule, layers: frozenset[int]) -> bool:
    if placed.layer is not None:
        return placed.layer in layers
    return is_on_stage(placed.rule, spec, layout, stage, scalar_head=False)


def _shards(
    spec: ModelSpec, layout: LayoutConfig, stages: list[int], placed: PlacedRule, vocab_multiple: int
) -> Iterator[tuple[int, Split]]:
    """The ranks that hold a parameter, with their shards of it. Of experts they count etp fastest, then ep."""
    padding = vocab_multiple * layout.tp
    expert_rank = None if placed.expert is None else placed.expert // num_local_experts(spec, layout)
    for rank in (stage * layout.stage_size + i for stage in stages for i in range(layout.stage_size)):
        if expert_rank is None:
            yield rank, Split(rank % layout.tp, layout.tp, padding)
        elif rank // layout.etp % layout.ep == expert_rank:
            yield rank, Split(rank % layout.etp, layout.etp, padding)
