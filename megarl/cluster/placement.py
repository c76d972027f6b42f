"""Plan which bundle of Ray's placement groups each process of a run gets, before anything is reserved in Ray.

A bundle holds one device. One rank of each layout (the actor's, the critic's, …) and, in colocated mode, an engine
share the device. In split mode an engine has a bundle with all of its devices to itself, or one on each node that it
fills. A placement group covers one node, so that its bundles stay together. Nodes are taken from Ray's hosts in turn:
in the order of cluster.hosts if it is set, otherwise the driver's host first. The trainer's nodes come before those of
engines.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.schema import Config, EngineConfig, LayoutConfig, NodesConfig
from megarl.errors import ConfigError


class RayNode(TypedDict):
    """An entry of `ray.nodes()`, as far as it is read here."""

    Alive: bool
    NodeManagerAddress: str
    NodeManagerHostname: str
    Resources: Mapping[str, float]


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
class Seat:
    """The place of one process: a bundle, numbered over all nodes of its group, and a share of the bundle's resources.

    shares: trainer ranks whose devices this process uses as well. further: for an engine over several nodes, the places
    of its processes on the nodes after the first, each with as many workers.
    """

    group: str
    bundle: int
    num_cpus: float
    num_gpus: float
    shares: tuple[int, ...] = ()
    further: tuple["Seat", ...] = ()

    @property
    def all_shares(self) -> tuple[int, ...]:
        """Return the trainer ranks whose devices an engine uses on all of its nodes, in the order of its workers."""
        return self.shares + tuple(rank for seat in self.further for rank in seat.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """A plan that assigns every process of a run to a node group and a place (`Seat`) there.

    ranks: places of the ranks in the actor's layout; other_ranks: places of the ranks in each further layout. judges:
    places of the servers of each entry of `rewards.judge_servers`.
    """

    groups: Mapping[str, NodeGroup]
    ranks: tuple[Seat, ...]
    other_ranks: tuple[tuple[Seat, ...], ...] = ()
    engines: tuple[Seat, ...] = ()
    judges: Mapping[str, tuple[Seat, ...]] = field(default_factory=dict)

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


def workers_per_node(config: Config) -> int:
    """Return how many workers of an engine lie on one node: all, or as many as a node has devices."""
    engine, placement = config.rollout.engine, config.placement
    if placement.mode == "colocated":
        per_node = devices_per_node(placement.trainer, config.actor.layout.world_size)
    else:
        per_node = devices_per_node(placement.engines, engine.num_engines * engine.num_workers)
    return min(engine.num_workers, per_node)


def cpu_share(num_processes: int) -> float:
    """Return each process's fraction of a bundle's CPUs: a power of two, so that Ray adds fractions up exactly."""
    return 0.5 ** (num_processes - 1).bit_length()


def plan_placement(
    config: Config,
    device: Mapping[str, float],
    *,
    with_engines: bool,
    with_trainer: bool = True,
    other_layouts: Sequence[LayoutConfig] = (),
    engine_ranks: Sequence[Sequence[int]] = (),
) -> PlacementPlan:
    """Plan the places of all ranks and engines.

    device: Ray resources to reserve per device, such as {"CPU": 1, "GPU": 1}; the processes on the device share them.
    engine_ranks: for each colocated engine, the trainer ranks whose devices its workers use; by default consecutive
    ranks. Without a trainer, engines need nodes of their own (placement.mode=split).
    """
    nodes, world_size = config.placement.trainer, config.actor.layout.world_size
    per_node = devices_per_node(nodes, world_size)
    groups = {"trainer": NodeGroup(num_nodes=nodes.num_nodes, bundles_per_node=per_node, bundle=device)}
    # The processes of a bundle are a rank of each layout and, possibly, an engine.
    num_cpus = device["CPU"] * cpu_share(len(other_layouts) + 2)
    seat = Seat(group="trainer", bundle=0, num_cpus=num_cpus, num_gpus=device.get("GPU", 0))
    guest = replace(seat, num_gpus=0)
    plan = PlacementPlan(
        groups=groups,
        ranks=tuple(replace(seat, bundle=rank) for rank in range(world_size)),
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
    engine, here = config.rollout.engine, workers_per_node(config)
    num_parts = engine.num_workers // here
    if config.placement.mode == "colocated":
        parts = [
            replace(guest, bundle=ranks[first], shares=tuple(ranks[first : first + here]))
            for ranks in engine_ranks or ranks_in_order(engine)
            for first in range(0, engine.num_workers, here)
        ]
    else:
        nodes = config.placement.engines
        groups["engines"] = NodeGroup(
            num_nodes=nodes.num_nodes,
            bundles_per_node=devices_per_node(nodes, engine.num_engines * engine.num_workers) // here,
            bundle={name: amount * here for name, amount in device.items()},
        )
        own = replace(seat, group="engines", num_cpus=seat.num_cpus * here, num_gpus=seat.num_gpus * here)
        parts = [replace(own, bundle=i) for i in range(engine.num_engines * num_parts)]
    firsts = range(0, len(parts), num_parts)
    return replace(plan, engines=tuple(replace(parts[i], further=tuple(parts[i + 1 : i + num_parts])) for i in firsts))


def with_judge_servers(plan: PlacementPlan, config: Config, device: Mapping[str, float]) -> PlacementPlan:
    """Add devices for the servers of `rewards.judge_servers` to a plan."""
    groups, judges = dict(plan.groups), dict[str, tuple[Seat, ...]]()
    for name, server in config.rewards.judge_servers.items():
        group = f"judge server {name}"
        bundle = {resource: amount * server.tp for resource, amount in device.items()}
        per_node = server.replicas // server.num_nodes
        groups[group] = NodeGroup(num_nodes=server.num_nodes, bundles_per_node=per_node, bundle=bundle)
        judges[name] = tuple(
            Seat(group=group, bundle=i, num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0))
            for i in range(server.replicas)
        )
    return replace(plan, groups=groups, judges=judges)


class Reservation:
    """The Ray placement groups that a plan needs; creating this object reserves them in a running cluster."""

    def __init__(
        self,
        plan: PlacementPlan,
        *,
        hosts: Sequence[str],
        timeout_s: float,
        environments: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Reserve the placement groups. `hosts`: names of Ray's hosts, in the order in which they get nodes.

        environments: the runtime environments of actors, by the kind of process that these are forked from.

        Raises:
            ConfigError: a host has too few devices, or too few are free.
        """
        self._groups, self._environments = plan.groups, environments or {}
        nodes = ray.nodes()
        in_turn = itertools.cycle(hosts_in_order(nodes, hosts, ray.util.get_node_ip_address()))
        addresses = {name: list(itertools.islice(in_turn, group.num_nodes)) for name, group in plan.groups.items()}
        require_devices(plan.groups, addresses, nodes)
        self._nodes = {name: _reserve(name, group, addresses[name], timeout_s) for name, group in plan.groups.items()}

    def options(self, seat: Seat, kind: str = "") -> dict[str, object]:
        """Return the Ray actor options (scheduling strategy, CPUs, GPUs) that put an actor into its place.

        kind: of the processes that the actor's is forked from, where there are such.
        """
        node, bundle = divmod(seat.bundle, self._groups[seat.group].bundles_per_node)
        placed = self._nodes[seat.group][node]
        strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=bundle)
        options = {"scheduling_strategy": strategy, "num_cpus": seat.num_cpus, "num_gpus": seat.num_gpus}
        environment = {"runtime_env": self._environments[kind]} if kind in self._environments else {}
        return {**options, **environment}


def hosts_in_order(nodes: Sequence[RayNode], hosts: Sequence[str], driver: str) -> list[str]:
    """Sort addresses of Ray's live nodes (`ray.nodes()`): first `hosts` in order, then the driver's, then others."""
    place = {host: i for i, host in enumerate(hosts)}
    alive = [(node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in nodes if node["Alive"]]
    ordered = sorted(alive, key=lambda node: (place.get(node[0], len(place)), node[1] != driver, node[1]))
    return [address for _, address in ordered]


def require_devices(
    groups: Mapping[str, NodeGroup], addresses: Mapping[str, Sequence[str]], nodes: Sequence[RayNode]
) -> None:
    """Raise ConfigError if a node has fewer resources than the groups take whose `addresses` name it.

    nodes: Ray's nodes (`ray.nodes()`). Waiting would not help: what a node has does not grow.
    """
    for node in nodes:
        address, has = node["NodeManagerAddress"], node["Resources"]
        if not node["Alive"]:
            continue
        here = {name: count for name, its in addresses.items() if (count := list(its).count(address))}
        needs = Counter[str]()
        for name, count in here.items():
            needs.update({key: n * groups[name].bundles_per_node * count for key, n in groups[name].bundle.items()})
        if any(amount > has.get(resource, 0) for resource, amount in needs.items()):
            wanted, offered = (
                ", ".join(f"{amounts.get(resource, 0):g} {resource}" for resource in needs) for amounts in (needs, has)
            )
            raise ConfigError(
                f"placement: host {node['NodeManagerHostname']} ({address}) has {offered}, expected {wanted} for "
                f"{' and '.join(here)}; use larger hosts, spread over more of them (placement.*.num_nodes), lower "
                f"actor.layout or rollout.engine, or, if CPUs are missing, raise cluster.num_cpus"
            )


def _reserve(name: str, group: NodeGroup, addresses: Sequence[str], timeout_s: float) -> list[PlacementGroup]:
    """Reserve one placement group per node, and fail after `timeout_s`, since Ray itself would wait forever.

    Raises:
        ConfigError: the cluster has too few free resources; the message lists the resources of each node.
    """
    others = [dict(group.bundle)] * (group.bundles_per_node - 1)
    # Ray gives every node one unit of a resource named after its address; any amount of it pins a group to the node.
    firsts = [{**group.bundle, f"node:{address}": 0.001} for address in addresses]
    nodes = [placement_group([first, *others], strategy="STRICT_PACK") for first in firsts]
    try:
        ray.get([node.ready() for node in nodes], timeout=timeout_s)
    except GetTimeoutError as error:
        raise ConfigError(
            f"placement: after {timeout_s:g} s the cluster has no room for {name} on {group}; it has "
            f"{resource_table(ray.nodes(), ray.available_resources())}; lower actor.layout or rollout.engine, change "
            f"placement, or raise cluster.num_cpus"
        ) from error
    return nodes


def resource_table(nodes: Sequence[RayNode], free: Mapping[str, float]) -> str:
    """Format each live node's CPUs and GPUs (from `ray.nodes()`), and the cluster's free ones last."""
    alive = [node for node in nodes if node["Alive"]]
    held = [(f"node {node['NodeManagerAddress']}", node["Resources"]) for node in alive]
    return "; ".join(
        f"{what}: " + ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        for what, resources in [*held, ("free in all", free)]
    )
