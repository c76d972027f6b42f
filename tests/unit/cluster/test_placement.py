"""Seats of ranks and engines, and what a user is told when there is no room for them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import ray

from megarl.cluster import reservation
from megarl.cluster.placement import (
    NodeGroup,
    PlacementPlan,
    ProcessSlot,
    cpu_share,
    plan_placement,
    with_judge_servers,
)
from megarl.cluster.reservation import (
    Reservation,
    hosts_in_order,
    require_devices,
    resource_table,
    spread_environments,
)
from megarl.config import Config, from_dict
from megarl.config.environments import EnvironmentConfig
from megarl.config.schema import LayoutConfig
from megarl.errors import ConfigError

GPU_DEVICE = {"CPU": 1.0, "GPU": 1.0}
CPU_DEVICE = {"CPU": 0.5}


def plan(
    device: Mapping[str, float],
    *,
    dp: int,
    engine: Mapping[str, int] | None = None,
    placement: Mapping[str, Any] | None = None,
    with_engines: bool = True,
    other_layouts: Sequence[LayoutConfig] = (),
) -> PlacementPlan:
    tree = {
        "actor": {"layout": {"dp": dp}},
        "rollout": {"engine": dict(engine or {})},
        "placement": dict(placement or {}),
    }
    return placed_as(from_dict(Config, tree), device, with_engines=with_engines, other_layouts=other_layouts)


def placed_as(config: Config, device: Mapping[str, float], **given: Any) -> PlacementPlan:
    return plan_placement(
        config.placement,
        config.rollout.engine,
        config.actor.layout.world_size,
        device,
        **{"with_engines": True} | given,
    )


def test_colocated_engines_share_the_devices_of_consecutive_ranks() -> None:
    placed = plan(GPU_DEVICE, dp=8, engine={"num_engines": 2, "tp": 4}, placement={"trainer": {"num_nodes": 2}})
    assert placed.groups == {"trainer": NodeGroup(num_nodes=2, bundles_per_node=4, bundle=GPU_DEVICE)}
    assert placed.ranks == tuple(ProcessSlot(group="trainer", bundle=i, num_cpus=0.5, num_gpus=1.0) for i in range(8))
    # Ray counts a device once, for its rank; the engine is told the ids.
    assert placed.engines == (
        ProcessSlot(group="trainer", bundle=0, num_cpus=0.5, num_gpus=0, shares=(0, 1, 2, 3)),
        ProcessSlot(group="trainer", bundle=4, num_cpus=0.5, num_gpus=0, shares=(4, 5, 6, 7)),
    )
    assert placed.num_cpus == 8


def test_colocated_engines_take_the_ranks_that_they_are_given() -> None:
    config = from_dict(Config, {"actor": {"layout": {"dp": 4}}, "rollout": {"engine": {"num_engines": 2, "tp": 2}}})
    placed = placed_as(config, GPU_DEVICE, engine_ranks=[(0, 2), (1, 3)])
    assert [(slot.bundle, slot.shares) for slot in placed.engines] == [(0, (0, 2)), (1, (1, 3))]


def test_servers_of_judges_have_devices_of_their_own() -> None:
    server = {"model": "m", "replicas": 4, "tp": 2, "num_nodes": 2}
    config = from_dict(Config, {"rewards": {"judge_servers": {"big": server}}})
    plain = placed_as(config, GPU_DEVICE)
    placed = with_judge_servers(plain, config.rewards.judge_servers, GPU_DEVICE)
    group = NodeGroup(num_nodes=2, bundles_per_node=2, bundle={"CPU": 2.0, "GPU": 2.0})
    assert placed.groups == {**plain.groups, "judge server big": group}
    assert placed.judges == {
        "big": tuple(ProcessSlot(group="judge server big", bundle=i, num_cpus=2.0, num_gpus=2.0) for i in range(4))
    }
    assert placed.num_cpus == plain.num_cpus + 8
    assert (placed.ranks, placed.engines) == (plain.ranks, plain.engines)


def test_engines_alone() -> None:
    config = from_dict(
        Config,
        {
            "rollout": {"engine": {"num_engines": 2, "tp": 2}},
            "placement": {"mode": "split", "engines": {"num_nodes": 2}},
        },
    )
    placed = placed_as(config, GPU_DEVICE, with_trainer=False)
    assert placed == PlacementPlan(
        groups={"engines": NodeGroup(num_nodes=2, bundles_per_node=1, bundle={"CPU": 2.0, "GPU": 2.0})},
        ranks=(),
        engines=tuple(ProcessSlot(group="engines", bundle=i, num_cpus=1.0, num_gpus=2.0) for i in range(2)),
    )


def test_split_engines_have_a_bundle_of_tp_devices_each() -> None:
    placed = plan(
        GPU_DEVICE,
        dp=2,
        engine={"num_engines": 4, "tp": 2},
        placement={"mode": "split", "engines": {"num_nodes": 2}},
    )
    assert placed.groups == {
        "trainer": NodeGroup(num_nodes=1, bundles_per_node=2, bundle=GPU_DEVICE),
        "engines": NodeGroup(num_nodes=2, bundles_per_node=2, bundle={"CPU": 2.0, "GPU": 2.0}),
    }
    assert placed.engines == tuple(ProcessSlot(group="engines", bundle=i, num_cpus=1.0, num_gpus=2.0) for i in range(4))
    assert placed.num_cpus == 2 + 8


def test_an_engine_over_several_nodes_has_a_place_on_each() -> None:
    """Two engines of 2 × 4 workers, over two nodes of four devices each; the first node of each has its process."""
    engine = {"num_engines": 2, "tp": 4, "pp": 2}
    placed = plan(GPU_DEVICE, dp=2, engine=engine, placement={"mode": "split", "engines": {"num_nodes": 4}})
    assert placed.groups["engines"] == NodeGroup(num_nodes=4, bundles_per_node=1, bundle={"CPU": 4.0, "GPU": 4.0})
    parts = [ProcessSlot(group="engines", bundle=i, num_cpus=2.0, num_gpus=4.0) for i in range(4)]
    assert placed.engines == (replace(parts[0], further=(parts[1],)), replace(parts[2], further=(parts[3],)))
    assert {slot.all_shares for slot in placed.engines} == {()}


def test_a_colocated_engine_over_several_nodes_shares_all_of_their_devices() -> None:
    engine = {"tp": 2, "pp": 3}
    placed = plan(GPU_DEVICE, dp=8, engine=engine, placement={"trainer": {"num_nodes": 4}})
    (first,) = placed.engines
    assert (first.bundle, first.shares) == (0, (0, 1))
    assert [(slot.bundle, slot.shares) for slot in first.further] == [(2, (2, 3)), (4, (4, 5))]
    assert first.all_shares == (0, 1, 2, 3, 4, 5)


def test_stages_that_fit_on_a_node_lie_there_together() -> None:
    engine = {"num_engines": 2, "tp": 2, "pp": 2}
    placed = plan(GPU_DEVICE, dp=1, engine=engine, placement={"mode": "split"})
    assert placed.groups["engines"] == NodeGroup(num_nodes=1, bundles_per_node=2, bundle={"CPU": 4.0, "GPU": 4.0})
    assert [slot.further for slot in placed.engines] == [(), ()]


def test_a_two_core_host_has_room_for_two_ranks_and_a_split_engine_of_two() -> None:
    placed = plan(CPU_DEVICE, dp=2, engine={"tp": 2}, placement={"mode": "split"})
    assert placed.num_cpus == 2
    assert {slot.num_gpus for slot in (*placed.ranks, *placed.engines)} == {0}


def test_processes_fit_their_bundles() -> None:
    """Ranks and engines in one bundle must not ask for more than it has."""
    for mode in ("colocated", "split"):
        placed = plan(GPU_DEVICE, dp=4, engine={"num_engines": 2, "tp": 2}, placement={"mode": mode})
        taken: dict[tuple[str, int], list[ProcessSlot]] = {}
        for slot in (*placed.ranks, *placed.engines):
            taken.setdefault((slot.group, slot.bundle), []).append(slot)
        for (group, _), slots in taken.items():
            assert sum(slot.num_cpus for slot in slots) <= placed.groups[group].bundle["CPU"]
            assert sum(slot.num_gpus for slot in slots) <= placed.groups[group].bundle["GPU"]


def test_ranks_of_further_layouts_share_the_devices_of_the_actors() -> None:
    others = [LayoutConfig(tp=2), LayoutConfig(dp=4)]
    placed = plan(GPU_DEVICE, dp=4, engine={"tp": 2}, other_layouts=others)
    # Four processes on the first device: a quarter of its CPUs each.
    assert placed.ranks[0] == ProcessSlot(group="trainer", bundle=0, num_cpus=0.25, num_gpus=1.0)
    assert placed.other_ranks == tuple(
        tuple(ProcessSlot(group="trainer", bundle=i, num_cpus=0.25, num_gpus=0, shares=(i,)) for i in range(size))
        for size in (2, 4)
    )
    assert placed.engines == (ProcessSlot(group="trainer", bundle=0, num_cpus=0.25, num_gpus=0, shares=(0, 1)),)
    # Devices are counted once, and the host offers no more CPUs than without them.
    assert placed.num_cpus == plan(GPU_DEVICE, dp=4, engine={"tp": 2}).num_cpus == 4


@pytest.mark.parametrize("num_processes", range(1, 9))
def test_shares_of_a_bundle_add_up_to_no_more_than_it_has_in_rays_units(num_processes: int) -> None:
    """Ray counts in ten-thousandths and rounds: thirds of a half would be too many."""
    units = round(0.5 * cpu_share(num_processes) * 10_000)
    assert units == 0.5 * cpu_share(num_processes) * 10_000
    assert num_processes * units <= 5_000


def test_without_engines_only_the_trainer_is_placed() -> None:
    placed = plan(CPU_DEVICE, dp=2, placement={"mode": "split"}, with_engines=False)
    assert (list(placed.groups), placed.engines) == (["trainer"], ())


def test_resource_table() -> None:
    nodes = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 96.0, "GPU": 8.0, "memory": 1e12}},
        {"Alive": False, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 96.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 2.5}},
    ]
    assert resource_table(nodes, {"CPU": 90.5, "GPU": 7.0}) == (
        "node 10.0.0.1: 96 CPU, 8 GPU; node 10.0.0.3: 2.5 CPU, 0 GPU; free in all: 90.5 CPU, 7 GPU"
    )


class FakeRay:
    """A Ray cluster that is full, unless it `has_room`; a wait takes no time but by the clock."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *addresses: str,
        driver: str = "127.0.0.1",
        num_devices: int = 1,
        has_room: bool = False,
    ) -> None:
        self.asked: list[tuple[list[dict[str, float]], str]] = []
        self._now_s = 0.0
        monkeypatch.setattr("megarl.cluster.remotes.awake_s", lambda: self._now_s)
        self._has_room, nodes = has_room, [_node(a, num_devices=num_devices) for a in addresses or [driver]]
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: driver)
        monkeypatch.setattr("megarl.cluster.reservation.placement_group", self._placement_group)
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})

    def _placement_group(self, bundles: list[dict[str, float]], strategy: str) -> "FakeRay":
        self.asked.append((bundles, strategy))
        return self

    def ready(self) -> None:
        return None

    def _get(self, refs: list[None], timeout: float) -> None:
        if not self._has_room:
            self._now_s += timeout
            raise ray.exceptions.GetTimeoutError


def _node(address: str, hostname: str = "", *, num_devices: int = 1) -> dict[str, Any]:
    return {
        "Alive": True,
        "NodeManagerAddress": address,
        "NodeManagerHostname": hostname,
        "Resources": {"CPU": float(num_devices), "GPU": float(num_devices)},
    }


def test_no_room_says_what_was_wanted_what_there_is_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    full = FakeRay(monkeypatch, num_devices=4)
    placed = plan(GPU_DEVICE, dp=4, placement={"trainer": {"num_nodes": 2}})
    with pytest.raises(ConfigError) as raised:
        Reservation(placed, hosts=(), timeout_s=5)
    assert str(raised.value) == (
        "placement: after 5 s the cluster has no room for trainer on 2 node(s) × 2 bundle(s) of 1 CPU, 1 GPU; it has "
        "node 127.0.0.1: 4 CPU, 4 GPU; free in all: 1 CPU, 0 GPU; lower actor.layout or rollout.engine, change "
        "placement, or raise cluster.num_cpus"
    )
    # A placement group per node, whose bundles stay together.
    assert full.asked == [([_on("127.0.0.1"), GPU_DEVICE], "STRICT_PACK")] * 2


def test_a_host_with_too_few_devices_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of four ranks each on hosts of four devices; an engine of two devices on a host of one."""
    nodes = [_node("10.0.0.1", "h1", num_devices=4), _node("10.0.0.2", "h2", num_devices=4), _node("10.0.0.3", "l1")]
    placement = {"mode": "split", "trainer": {"num_nodes": 2}}
    groups = plan(GPU_DEVICE, dp=8, engine={"tp": 2}, placement=placement).groups
    addresses = {"trainer": ["10.0.0.1", "10.0.0.2"], "engines": ["10.0.0.3"]}
    with pytest.raises(ConfigError) as raised:
        require_devices(groups, addresses, nodes)
    assert str(raised.value).startswith(
        "placement: host l1 (10.0.0.3) has 1 CPU, 1 GPU, expected 2 CPU, 2 GPU for engines; use larger hosts, spread"
    )
    nodes[2]["Resources"] = {"CPU": 2.0, "GPU": 2.0}
    require_devices(groups, addresses, nodes)
    # Without a GPU, and with a host for both.
    nodes[2]["Resources"] = {"CPU": 64.0}
    with pytest.raises(ConfigError, match=r"has 64 CPU, 0 GPU, expected 2 CPU, 2 GPU for engines;"):
        require_devices(groups, addresses, nodes)
    with pytest.raises(ConfigError, match=r"host h2 .* has 4 CPU, 4 GPU, expected 6 CPU, 6 GPU for trainer and"):
        require_devices(groups, addresses | {"engines": ["10.0.0.2"]}, nodes)
    full = FakeRay(monkeypatch)
    with pytest.raises(ConfigError, match="has 1 CPU, 1 GPU, expected 2 CPU, 2 GPU for trainer;"):
        Reservation(plan(GPU_DEVICE, dp=2), hosts=(), timeout_s=5)
    assert full.asked == []


def test_nodes_take_the_hosts_in_turn_the_drivers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    full = FakeRay(monkeypatch, "10.0.0.1", "10.0.0.2", "10.0.0.3", driver="10.0.0.2")
    split = {"mode": "split", "trainer": {"num_nodes": 2}, "engines": {"num_nodes": 1}}
    with pytest.raises(ConfigError):
        Reservation(plan(GPU_DEVICE, dp=2, engine={"num_engines": 1}, placement=split), hosts=(), timeout_s=5)
    assert full.asked == [([_on("10.0.0.2")], "STRICT_PACK"), ([_on("10.0.0.1")], "STRICT_PACK")]
    full = FakeRay(monkeypatch, "10.0.0.1", "10.0.0.2", "10.0.0.3", driver="10.0.0.2", has_room=True)
    Reservation(plan(GPU_DEVICE, dp=2, engine={"num_engines": 1}, placement=split), hosts=(), timeout_s=5)
    assert [bundles for bundles, _ in full.asked] == [[_on(f"10.0.0.{i}")] for i in (2, 1, 3)]


def test_named_hosts_are_taken_in_their_order() -> None:
    """The trainer's nodes come first, so that each group lies on the hosts that were asked for it."""
    nodes = [_node(f"10.0.0.{i}", hostname=name) for i, name in enumerate("dcba", start=1)]
    dead = {**_node("10.0.0.9", hostname="e"), "Alive": False}
    assert hosts_in_order([*nodes, dead], ("b", "e", "d"), "10.0.0.4") == [f"10.0.0.{i}" for i in (3, 1, 4, 2)]


NODES = EnvironmentConfig(hosts=5, nodes=2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NODES, ["id of b", "id of c", "id of b", "id of c", "id of b"]),
        (replace(NODES, nodes=3), "environment.nodes: got 3, but .* the cluster has 2; .*--environment-nodes=3`, add"),
        (
            replace(NODES, hosts=7),
            r"environment.hosts: got 7 on 2 node\(s\), up to 4 on each, but h-b \(b\) has 3 CPUs",
        ),
    ],
    ids=["room", "no such nodes", "too few CPUs"],
)
def test_environment_workers_get_unused_nodes_in_turn(
    config: EnvironmentConfig, expected: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are on a, which is the driver's, and on d; e is dead, and f out of reach."""
    nodes = [_node(address, f"h-{address}", num_devices=3) for address in "fedcba"]
    nodes = [node | {"NodeID": f"id of {node['NodeManagerAddress']}", "NodeManagerPort": 7} for node in nodes]
    nodes[1]["Alive"] = False
    FakeRay(monkeypatch, driver="a", has_room=True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(reservation, "why_not", lambda address, within_s: "no route" if address == "f:7" else "")
    placed = plan(GPU_DEVICE, dp=4, placement={"trainer": {"num_nodes": 2}})
    reserved = Reservation(placed, hosts=["h-a", "h-d", "h-b"], timeout_s=1.0)
    if isinstance(expected, list):
        assert spread_environments(config, reserved.unused_nodes()) == expected
        return
    with pytest.raises(ConfigError, match=f"^{expected}"):
        spread_environments(config, reserved.unused_nodes())


def _on(address: str) -> dict[str, float]:
    """A device's bundle that only one host has."""
    return {**GPU_DEVICE, f"node:{address}": 0.001}
