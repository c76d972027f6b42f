"""Plan the nodes of a run and what they need of their hosts' memory, and compare that with this host."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megarl.cluster.placement import NodeGroup, ProcessSlot, devices_per_node, plan_placement, with_judge_servers
from megarl.config.generation import PlacementConfig
from megarl.config.layout import LayoutConfig
from megarl.config.lora import sent_alone
from megarl.host.device.platform import platform
from megarl.host.memory import listed
from megarl.plan.devices import checkpoint_host_bytes
from megarl.plan.run_plan import DevicePlan, NodePlan
from megarl.plan.sizes import SizedRun, store_of
from megarl.record.checkpoints import Command


def plan_nodes(run: SizedRun, devices: Sequence[DevicePlan]) -> tuple[NodePlan, ...]:
    """List the trainer's nodes, then, if there is an engine, those that only engines use, judges', environments'."""
    config, engine, device = run.config, run.engine, {"CPU": 1.0}
    num_ranks = config.actor.layout.world_size
    with_engines = engine is not None
    placement = plan_placement(config.placement, config.rollout.engine, num_ranks, device, with_engines=with_engines)
    placement = with_judge_servers(placement, config.rewards.judge_servers if with_engines else {}, device)
    # Engines that have read their weights themselves keep them on the host while they sleep.
    asleep = engine.weights if engine and sent_alone(config.actor.lora) is not None and engine.shares_devices else 0
    held = {
        device: alike.on_host + (alike.offloaded + asleep if run.offloads else 0)
        for alike in devices
        for device in alike.devices
    }
    nodes = []
    for name, group in placement.groups.items():
        for node in range(group.num_nodes):
            here = partial(_numbers_on, name, group, node)
            ranks = here(placement.ranks)
            checkpoint, portable = (
                checkpoint_host_bytes(run.roles, run.shards, ranks, portable=portable) for portable in (False, True)
            )
            nodes.append(
                NodePlan(
                    ranks=ranks,
                    engines=here(placement.engines),
                    offloaded=sum(held[rank] for rank in ranks),
                    checkpoint=checkpoint,
                    portable_checkpoint=portable,
                    judge_servers={key: found for key, slots in placement.judges.items() if (found := here(slots))},
                )
            )
    alone = NodePlan(ranks=(), engines=(), offloaded=0, checkpoint=0, portable_checkpoint=0)
    cfg = config.environment
    every = [range(node, cfg.hosts, cfg.nodes) for node in range(cfg.nodes if with_engines else 0)]
    return (*nodes, *(replace(alone, environments=tuple(each)) for each in every))


def _numbers_on(name: str, group: NodeGroup, node: int, slots: Sequence[ProcessSlot]) -> tuple[int, ...]:
    """Return which of the processes with these slots are on a node of the group `name`, or have a part there."""
    here, per_node = (name, node), group.bundles_per_node
    return tuple(
        i
        for i, slot in enumerate(slots)
        if any((part.group, part.bundle // per_node) == here for part in (slot, *slot.further))
    )


def host_needs(run: SizedRun, command: Command = "train") -> dict[str, int]:
    """Return the bytes of host memory that the fullest node needs at least, by what needs them."""
    devices = run.devices()
    nodes = plan_nodes(run, devices)
    fullest, held = max(nodes, key=lambda node: (node.offloaded, len(node.ranks))), {}
    if platform().name == "cpu":
        peaks = {i: max(phase.total for phase in each.phases.values()) for each in devices for i in each.devices}
        held["ranks, and engines beside them"] = sum(peaks[rank] for rank in fullest.ranks)
    store = store_of(run.config, command, room=1 << 60)
    is_portable = run.config.checkpoint.portable
    return {
        **held,
        "the offloaded trainer": fullest.offloaded,
        "a checkpoint in the making": fullest.portable_checkpoint if is_portable else fullest.checkpoint,
        "Ray's object store": store.value << 20 if store and isinstance(store.value, int) else 0,
    }


def host_warnings(
    placement: PlacementConfig, layout: LayoutConfig, needs: Mapping[str, int], host_bytes: int
) -> Iterator[str]:
    """Warn if this host, with that much memory, has less than `host_needs` counts, or fewer CPUs than ranks."""
    if sum(needs.values()) > host_bytes:
        yield (
            f"host memory: a node needs at least {listed(needs)}, but this host has {host_bytes / 2**30:,.0f}; use "
            "more or larger nodes or a smaller model; --device-gib plans for others"
        )
    num_ranks = devices_per_node(placement.trainer, layout.world_size)
    if platform().name == "cpu" and num_ranks > (num_cpus := len(os.sched_getaffinity(0))):
        yield f"actor.layout: {num_ranks} ranks on a node take turns on the {num_cpus} CPUs of this host; use fewer"
