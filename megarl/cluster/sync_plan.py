"""Compute which slices of Hugging Face tensors each trainer rank holds, and plan what a weight sync sends."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.cluster.placement import devices_per_node, ranks_in_order
from megarl.config.lora import LoraConfig, sent_alone
from megarl.config.schema import (
    ActorConfig,
    EngineConfig,
    LayoutConfig,
    ModelConfig,
    NodesConfig,
    PlacementConfig,
    SyncConfig,
)
from megarl.host.device.platform import Platform
from megarl.sync.plan.assign import Holding, best_neighbours, overlaps
from megarl.sync.plan.build import Plan, build_plan
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.plan.links import LinkSettings, LinkStatistics, Medium, link_statistics
from megarl.sync.transport.casts import sent_specs
from megarl.sync.transport.process_plans import link_settings_of
from megarl.weights.adapters import adapter_spec
from megarl.weights.boxes import Box, joined
from megarl.weights.families import ModelSpec
from megarl.weights.safetensors_map import TensorSpec, weight_specs
from megarl.weights.shards import is_on_stage, num_local_experts, stage_layers
from megarl.weights.slices import Split, shard_boxes


def rank_holdings(spec: ModelSpec, layout: LayoutConfig, *, vocab_multiple: int) -> list[Holding]:
    """Compute the parts of tensors that every rank will hold; equals `RankWorker.held_weights`, but needs no model.

    Ranks that hold the same share one mapping.
    """
    found = dict[tuple[int, int, int, int], Holding]()
    holdings = list[Holding]()
    for rank in range(layout.world_size):
        # Along ranks, etp varies fastest, then ep.
        at = (rank // layout.stage_size, rank % layout.tp, rank % layout.etp, rank // layout.etp % layout.ep)
        if at not in found:
            found[at] = _holding_at(spec, layout, *at, padding=vocab_multiple * layout.tp)
        holdings.append(found[at])
    return holdings


def _holding_at(
    spec: ModelSpec, layout: LayoutConfig, stage: int, tp_rank: int, etp_rank: int, ep_rank: int, *, padding: int
) -> Holding:
    """Compute what a rank holds, given its pipeline stage and its positions along tp, etp and ep."""
    boxes, count = defaultdict[str, list[Box]](list), num_local_experts(spec, layout)
    layers = frozenset(stage_layers(layout, spec.dims.num_layers, stage))
    for placed in spec.rules(range(ep_rank * count, (ep_rank + 1) * count)):
        rule = placed.rule
        at_end = placed.layer is None and is_on_stage(rule, spec, layout, stage, scalar_head=False)
        if not at_end and placed.layer not in layers:
            continue
        split = Split(*((tp_rank, layout.tp) if placed.expert is None else (etp_rank, layout.etp)), padding)
        copied = rule.tied_to if spec.is_copy(rule) else None
        for tensor, box in zip(rule.tensors, shard_boxes(rule, spec.dims, split, by_expert=True), strict=True):
            boxes[placed.name(copied or tensor.sent_name)].append(box)
    return {name: joined(each) for name, each in boxes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """The input for a sync plan: all tensors, the slices that ranks hold, and the slices that engine workers need."""

    specs: Mapping[str, TensorSpec]
    held: Sequence[Holding]
    needs: Sequence[Holding]


def sent_spec(lora: LoraConfig | None, spec: ModelSpec) -> ModelSpec:
    """Describe what a weight sync of the actor sends, as a model: all of its weights, or its adapters alone."""
    alone = sent_alone(lora)
    return spec if alone is None else adapter_spec(spec, alone)


def plan_input_of(
    spec: ModelSpec, model: ModelConfig, actor: ActorConfig, engine: EngineConfig, sync: SyncConfig
) -> PlanInput:
    """Compute which slices of the weights the trainer's ranks hold, and which slices the engine workers need."""
    sent = sent_spec(actor.lora, spec)
    return PlanInput(
        specs=sent_specs(sent, weight_specs(sent, model.dtype, by_expert=True), sync.dtype),
        held=rank_holdings(sent, actor.layout, vocab_multiple=model.vocab_multiple),
        needs=engine_needs(sent, engine.tp, stages=engine.pp, expert_parallel=engine.expert_parallel),
    )


def engine_ranks(plan_input: PlanInput, engine: EngineConfig, trainer: NodesConfig) -> list[tuple[int, ...]]:
    """Choose the trainer ranks whose devices each colocated engine shares, so that a weight sync sends few bytes.

    Every worker stays on its node. Engines get consecutive ranks unless another choice saves bytes.
    """
    in_order, size = list(itertools.chain(*ranks_in_order(engine))), len(plan_input.needs)
    per_node = devices_per_node(trainer, len(plan_input.held))
    shared = overlaps(plan_input.specs, dict(enumerate(plan_input.held)), dict(enumerate(plan_input.needs)))
    chosen = list[int]()
    for first in range(0, len(in_order), per_node):
        here = [rank - first for rank in in_order[first : first + per_node]]
        # Engines of one node follow each other, and one over several nodes has a part of its workers on each.
        gains = np.stack([shared[(first + i) % size, first : first + per_node] for i in range(len(here))])
        best, each = best_neighbours(gains), np.arange(len(gains))
        if gains[each, best].sum() == gains[each, here].sum():
            best = here
        chosen += [rank + first for rank in best]
    return [tuple(chosen[i : i + size]) for i in range(0, len(chosen), size)]


def bridge_plan(plan_input: PlanInput, engine: EngineConfig, placement: PlacementConfig) -> Plan:
    """Plan which rank sends which slices of weights to which engine worker; workers are numbered after the ranks."""
    first, num_workers = len(plan_input.held), engine.num_engines * len(plan_input.needs)
    colocated = placement.mode == "colocated"
    workers = list(itertools.chain(*engine_ranks(plan_input, engine, placement.trainer))) if colocated else []
    per_node = devices_per_node(placement.trainer, first)
    hosts = [("trainer", rank // per_node) for rank in [*range(first), *workers]]
    if not colocated:
        per_node = devices_per_node(placement.engines, num_workers)
        hosts += [("engines", i // per_node) for i in range(num_workers)]
    return build_plan(
        plan_input.specs,
        dict(enumerate(plan_input.held)),
        dict(enumerate(list(plan_input.needs) * engine.num_engines, start=first)),
        neighbours={first + i: [rank] for i, rank in enumerate(workers)},
        hosts=dict(enumerate(hosts)),
    )


def gloo_warning(plan: Plan, settings: SyncConfig, here: Platform) -> str | None:
    """Return what a sync by gloo between hosts with CUDA costs, if the settings ask for that; None if they do not."""
    if settings.host_group != "gloo" or settings.delta or here.backend != "nccl":
        return None
    links = link_statistics(plan, LinkSettings(grouped=False, nearby=False), hosts=plan.hosts, beside={})
    tcp = next(load for load in links.loads if load.medium is Medium.NETWORK)
    if not tcp.num_bytes:
        return None
    return (
        f"sync.host_group: got gloo, which sends {tcp.busiest_bytes / 1e9:,.1f} GB per sync to or from one host over "
        f"TCP from pageable memory: about {tcp.seconds:,.1f} s; set it to device, or to null"
    )


def bridge_links(settings: SyncConfig, plan: Plan, here: Platform) -> LinkStatistics | None:
    """Estimate the time of a weight sync over what would carry its messages on a platform; None on CPUs."""
    if here.backend != "nccl":
        return None
    beside = {receiver: min(sources) for receiver, sources in plan.neighbours.items()}
    link_settings = link_settings_of(plan, settings, here, hosts=plan.hosts, beside=beside)
    return link_statistics(plan, link_settings, hosts=plan.hosts, beside=beside)
