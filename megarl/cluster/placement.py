"""Plan which bundle of Ray's placement groups each process of a run gets, before anything is reserved in Ray.

A bundle holds one device. One rank of each layout (the actor's, the critic's, …) and, in colocated mode, an engine
share the device. In split mode an engine has a bundle with all of its devices to itself, or one on each node that it
fills. A placement group covers one node, so that its bundles stay together. Nodes are taken from Ray's hosts in turn:
in the order of cluster.hosts if it is set, otherwise the driver's host first. The trainer's nodes come before those of
engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megarl.config.engine import EngineConfig
from megarl.config.generation import NodesConfig, PlacementConfig
from megarl.config.judges import JudgeServerConfig
from megarl.config.layout import LayoutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """A group of equal nodes, each divided into equal Ray bundles; `bundle` has the resources of one bundle."""

    num_nodes: int
    bundles_per_node: int
    bundle: Mapping[str, float]

    def __str__(self) -> str:
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        return f"{self.num_nodes} node(s) × {self.bundles_per_node} bundle(s) of {each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSlot:
    """The place of one process: a bundle, numbered over all nodes of its group, and a share of the bundle's resources.

    shares: trainer ranks whose devices this process uses as well. further: for an engine over several nodes, the places
    of its processes on the nodes after the first, each with as many workers.
    """

    group: str
    bundle: int
    num_cpus: float
    num_gpus: float
    shares: tuple[int, ...] = ()
    further: tuple["ProcessSlot", ...] = ()

    @property
    def all_shares(self) -> tuple[int, ...]:
        """Return the trainer ranks whose devices an engine uses on all of its nodes, in the order of its workers."""
        return self.shares + tuple(rank for slot in self.further for rank in slot.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """A plan that assigns every process of a run to a node group and a place (`ProcessSlot`) there.

    ranks: places of the ranks in the actor's layout; other_ranks: places of the ranks in each further layout. judges:
    places of the servers of each entry of `rewards.judge_servers`.
    """

    groups: Mapping[str, NodeGroup]
    ranks: tuple[ProcessSlot, ...]
    other_ranks: tuple[tuple[ProcessSlot, ...], ...] = ()
    engines: tuple[ProcessSlot, ...] = ()
    judges: Mapping[str, tuple[ProcessSlot, ...]] = field(default_factory=dict)

    @property
    def num_cpus(self) -> float:
        """Return the number of logical CPUs that all groups reserve."""
        return sum(g.num_nodes * g.bundles_per_node * g.bundle["CPU"] for g in self.groups.values())


def devices_per_node(nodes: NodesConfig, num_devices: int) -> int:
    """Return the number of devices on each node: the configured number, or else `num_devices` divided evenly."""
    return nodes.devices_per_node or num_devices // nodes.num_nodes


def ranks_in_order(engine: EngineConfig) -> list[tuple[int, ...]]:
    """Give each colocated engine consecutive trainer ranks to share devices with, one rank for each of its workers."""
    size = engine.num_workers
    return [tuple(range(i * size, (i + 1) * size)) for i in range(engine.num_engines)]


def workers_per_node(placement: PlacementConfig, engine: EngineConfig, *, num_ranks: int) -> int:
    """Return how many workers of an engine lie on one node: all, or as many as a node has devices."""
    if placement.mode == "colocated":
        per_node = devices_per_node(placement.trainer, num_ranks)
    else:
        per_node = devices_per_node(placement.engines, engine.num_engines * engine.num_workers)
    return min(engine.num_workers, per_node)


def cpu_share(num_processes: int) -> float:
    """Return each process's fraction of a bundle's CPUs: a power of two, so that Ray adds fractions up exactly."""
    return 0.5 ** (num_processes - 1).bit_length()


def plan_placement(
    placement: PlacementConfig,
    engine: EngineConfig,
    num_ranks: int,
    device: Mapping[str, float],
    *,
    with_engines: bool,
    with_trainer: bool = True,
    other_layouts: Sequence[LayoutConfig] = (),
    engine_ranks: Sequence[Sequence[int]] = (),
) -> PlacementPlan:
    """Plan the places of all ranks and engines.

    num_ranks: of the actor. device: Ray resources to reserve per device, such as {"CPU": 1, "GPU": 1}; the processes on
    the device share them. engine_ranks: for each colocated engine, the trainer ranks whose devices its workers use; by
    default consecutive ranks. Without a trainer, engines need nodes of their own (placement.mode=split).
    """
    nodes = placement.trainer
    per_node = devices_per_node(nodes, num_ranks)
    groups = {"trainer": NodeGroup(num_nodes=nodes.num_nodes, bundles_per_node=per_node, bundle=device)}
    # The processes of a bundle are a rank of each layout and, possibly, an engine.
    num_cpus = device["CPU"] * cpu_share(len(other_layouts) + 2)
    slot = ProcessSlot(group="trainer", bundle=0, num_cpus=num_cpus, num_gpus=device.get("GPU", 0))
    guest = replace(slot, num_gpus=0)
    plan = PlacementPlan(
        groups=groups,
        ranks=tuple(replace(slot, bundle=rank) for rank in range(num_ranks)),
        other_ranks=tuple(
            tuple(replace(guest, bundle=rank, shares=(rank,)) for rank in range(layout.world_size))
            for layout in other_layouts
        ),
    )
    if not with_trainer:
        del groups["trainer"]
        plan = PlacementPlan(groups=groups, ranks=())
    if not with_engines:
        return plan
    here = workers_per_node(placement, engine, num_ranks=num_ranks)
    num_parts = engine.num_workers // here
    if placement.mode == "colocated":
        parts = [
            replace(guest, bundle=ranks[first], shares=tuple(ranks[first : first + here]))
            for ranks in engine_ranks or ranks_in_order(engine)
            for first in range(0, engine.num_workers, here)
        ]
    else:
        nodes = placement.engines
        groups["engines"] = NodeGroup(
            num_nodes=nodes.num_nodes,
            bundles_per_node=devices_per_node(nodes, engine.num_engines * engine.num_workers) // here,
            bundle={name: amount * here for name, amount in device.items()},
        )
        own = replace(slot, group="engines", num_cpus=slot.num_cpus * here, num_gpus=slot.num_gpus * here)
        parts = [replace(own, bundle=i) for i in range(engine.num_engines * num_parts)]
    firsts = range(0, len(parts), num_parts)
    return replace(plan, engines=tuple(replace(parts[i], further=tuple(parts[i + 1 : i + num_parts])) for i in firsts))


def with_judge_servers(
    plan: PlacementPlan, servers: Mapping[str, JudgeServerConfig], device: Mapping[str, float]
) -> PlacementPlan:
    """Add devices for the servers of `rewards.judge_servers` to a plan."""
    groups, judges = dict(plan.groups), dict[str, tuple[ProcessSlot, ...]]()
    for name, server in servers.items():
        group = f"judge server {name}"
        bundle = {resource: amount * server.tp for resource, amount in device.items()}
        per_node = server.replicas // server.num_nodes
        groups[group] = NodeGroup(num_nodes=server.num_nodes, bundles_per_node=per_node, bundle=bundle)
        judges[name] = tuple(
            ProcessSlot(group=group, bundle=i, num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0))
            for i in range(server.replicas)
        )
    return replace(plan, groups=groups, judges=judges)
