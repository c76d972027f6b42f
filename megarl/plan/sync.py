"""What a layout's ranks hold, in the coordinates of Hugging Face tensors, and what the bridge then moves per sync."""

from collections.abc import Iterator

from megarl.config.schema import Config, LayoutConfig
from megarl.export import weight_specs
from megarl.parallel.weights.bridge.boxes import Box
from megarl.parallel.weights.bridge.casts import wire_specs
from megarl.parallel.weights.bridge.needs import engine_needs
from megarl.parallel.weights.bridge.plan import BUCKET_BYTES, Plan, build_plan
from megarl.parallel.weights.bridge.splits import Split, split_box
from megarl.parallel.weights.families import ModelSpec, PlacedRule
from megarl.placement import plan_placement
from megarl.plan.shards import is_on_stage, num_local_experts, stage_layers


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


def bridge_plan(config: Config, spec: ModelSpec) -> Plan:
    """The plan that the engines of a run get their weights by; sinks count on from the last rank."""
    layout, engine = config.actor.layout, config.rollout.engine
    needs = engine_needs(spec, engine.tp)
    first, seats = layout.world_size, plan_placement(config, {"CPU": 1.0}, with_engines=True).engines
    return build_plan(
        wire_specs(spec, weight_specs(spec, config.model.dtype), config.sync.dtype),
        dict(enumerate(rank_holdings(spec, layout, vocab_multiple=config.model.vocab_multiple))),
        {first + i: needs[i % engine.tp] for i in range(engine.num_engines * engine.tp)},
        neighbours={
            first + i * engine.tp + worker: [rank]
            for i, seat in enumerate(seats)
            for worker, rank in enumerate(seat.shares)
        },
        bucket_bytes=BUCKET_BYTES,
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
    for rank in (stage * layout.stage_size + i for stage in stages for i in range(layout.stage_size)):
        if placed.expert is None:
            yield rank, Split(rank % layout.tp, layout.tp, padding)
        elif rank // layout.etp % layout.ep == placed.expert // num_local_experts(spec, layout):
            yield rank, Split(rank % layout.etp, layout.etp, padding)
