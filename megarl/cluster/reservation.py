"""Reserve the Ray placement groups of a plan, each on one node, and say what a cluster lacks for them."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypedDict

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.placement import NodeGroup, PlacementPlan, ProcessSlot
from megarl.cluster.remotes import got
from megarl.config.environments import EnvironmentConfig
from megarl.errors import ConfigError
from megarl.host.reach import why_not

# How long a node gets to accept a connection.
REACH_S = 1.0


class RayNode(TypedDict):
    """An entry of `ray.nodes()`, as far as it is read here."""

    Alive: bool
    NodeID: str
    NodeManagerAddress: str
    NodeManagerPort: int
    NodeManagerHostname: str
    Resources: Mapping[str, float]


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
        nodes, self._driver, self._hosts = ray.nodes(), ray.util.get_node_ip_address(), hosts
        in_turn = itertools.cycle(hosts_in_order(nodes, hosts, self._driver))
        addresses = {name: list(itertools.islice(in_turn, group.num_nodes)) for name, group in plan.groups.items()}
        require_devices(plan.groups, addresses, nodes)
        self._taken = {self._driver, *itertools.chain(*addresses.values())}
        self._nodes = {name: _reserve(name, group, addresses[name], timeout_s) for name, group in plan.groups.items()}

    def options(self, slot: ProcessSlot, kind: str = "") -> dict[str, object]:
        """Return the Ray actor options (scheduling strategy, CPUs, GPUs) that put an actor into its place.

        kind: that of the process from which the actor's is forked, if it is.
        """
        node, bundle = divmod(slot.bundle, self._groups[slot.group].bundles_per_node)
        placed = self._nodes[slot.group][node]
        strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=bundle)
        options = {"scheduling_strategy": strategy, "num_cpus": slot.num_cpus, "num_gpus": slot.num_gpus}
        environment = {"runtime_env": self._environments[kind]} if kind in self._environments else {}
        return {**options, **environment}

    def unused_nodes(self) -> list[RayNode]:
        """List the living nodes within reach on which nothing is placed, nor the driver, in the order of hosts."""
        nodes: list[RayNode] = ray.nodes()
        by_address = {node["NodeManagerAddress"]: node for node in nodes if node["Alive"]}
        order = [each for each in hosts_in_order(nodes, self._hosts, self._driver) if each not in self._taken]
        # Ray needs up to cluster.node_timeout_s to take a node for dead.
        return [
            node
            for node in map(by_address.__getitem__, order)
            if not why_not(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", within_s=REACH_S)
        ]


def hosts_in_order(nodes: Sequence[RayNode], hosts: Sequence[str], driver: str) -> list[str]:
    """Sort addresses of Ray's live nodes (`ray.nodes()`): first `hosts` in order, then the driver's, then others."""
    place = {host: i for i, host in enumerate(hosts)}
    alive = [(node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in nodes if node["Alive"]]
    ordered = sorted(alive, key=lambda node: (place.get(node[0], len(place)), node[1] != driver, node[1]))
    return [address for _, address in ordered]


def spread_environments(config: EnvironmentConfig, unused: Sequence[RayNode]) -> list[str]:
    """Return for each environment worker the id of its node: one of the first unused ones, in turn.

    Raises ConfigError: there are fewer nodes than environment.nodes, or one has fewer CPUs than workers.
    """
    if len(unused) < config.nodes:
        raise ConfigError(
            f"environment.nodes: got {config.nodes}, but besides the driver's node and those of ranks, engines and "
            f"judges the cluster has {len(unused)}; submit the run with `megarl slurm submit --environment-nodes="
            f"{config.nodes}`, add nodes to the cluster at cluster.address, or lower it"
        )
    for node in unused[: config.nodes]:
        where = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        config.require_cpus(node["Resources"].get("CPU", 0), where)
    return [unused[i % config.nodes]["NodeID"] for i in range(config.hosts)]


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
        got([node.ready() for node in nodes], timeout_s)
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
