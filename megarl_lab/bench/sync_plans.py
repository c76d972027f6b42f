"""Measure plans of large models: bytes by rank and by link, what placement saves, the time, and the time to plan.

Nothing is moved: what ranks hold and engines need is worked out from published sizes. Every plan is estimated
(megarl.sync.plan.links) over the host's memory, which is not page-locked, and TCP between hosts; over page-locked
memory, and NCCL between hosts; and over NCCL alone, from where ranks hand on to the engine workers on their devices.
Buckets follow each other, and each takes as long as its busiest link.

The bound is the least time of any plan over NCCL that brings every byte from the nearest rank that holds it: a worker
receives what no rank on its device, or none on its host, holds, and ranks share evenly what only they hold.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cluster.sync_plan import rank_holdings
from megarl.config.generation import SyncConfig
from megarl.config.schema import LayoutConfig
from megarl.record.text_table import align
from megarl.sync.plan.assign import Holding, alike_tensors, replicas_of
from megarl.sync.plan.build import Plan, build_plan
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.plan.links import LinkSettings, LinkStatistics, Medium, Rates, link_statistics
from megarl.sync.plan.neighbours import best_neighbours, overlaps
from megarl.sync.transport.process_plans import most_staging
from megarl.weights.boxes import num_elements, pieces
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import TensorSpec, weight_specs

_CONFIGS = Path(__file__).parents[2] / "configs" / "model" / "hf"
_DEVICES_PER_HOST = 8
WAYS = {
    "memory, TCP": LinkSettings(grouped=False, nearby=False, page_locked=False),
    "page-locked memory, NCCL": LinkSettings(grouped=True, nearby=False),
    "NCCL": LinkSettings(grouped=True, nearby=True),
}
# In turn, of the bound; and what a rank may stage.
_MOST_WAITING, _MOST_STAGING = 1.15, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model, its trainer's layout, and engines of `tp` workers on the same devices, eight on a host.

    most_seconds: of CPU, to plan it.
    """

    name: str
    config: str
    layout: LayoutConfig
    tp: int
    most_seconds: float = 20.0

    @property
    def size(self) -> int:
        return self.layout.world_size

    @property
    def num_engines(self) -> int:
        return self.size // self.tp

    def trainer(self) -> str:
        return f"{self.size}: TP{self.layout.tp} PP{self.layout.pp} DP{self.layout.dp} EP{self.layout.ep}"

    def engines(self) -> str:
        return f"{self.num_engines} × TP{self.tp}"


SCENARIOS = (
    Scenario(name="Qwen3-8B", config="qwen3-8b", layout=LayoutConfig(tp=4, dp=2), tp=1),
    Scenario(name="Qwen3-30B-A3B", config="qwen3-30b-a3b", layout=LayoutConfig(tp=4, pp=2, dp=4, ep=8), tp=2),
    Scenario(
        name="Qwen3-235B-A22B",
        config="qwen3-235b-a22b",
        layout=LayoutConfig(tp=4, pp=8, dp=4, ep=16, first_stage_layers=11, last_stage_layers=11),
        tp=8,
    ),
    Scenario(
        name="DeepSeek-V3 671B",
        config="deepseek-v3",
        layout=LayoutConfig(tp=8, pp=8, dp=8, ep=64, first_stage_layers=7, last_stage_layers=6),
        tp=16,
        most_seconds=90.0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpread:
    """Bytes over ranks."""

    least: int
    mean: float
    most: int

    def __str__(self) -> str:
        return " / ".join(f"{each / 1e9:.2f}" for each in (self.least, self.mean, self.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The figures of a plan.

    links: by ways. staging_bytes: the most of a rank. saved: the part of what workers need that their own devices
    hold, with workers in the order of ranks and where they overlap most within their engine. seconds: of CPU, for what
    ranks hold, what workers need, placement, and the plan; all in one thread.
    """

    name: str
    trainer: str
    engines: str
    num_tensors: int
    model_bytes: int
    received: RankSpread
    sent: RankSpread
    saved_in_order: float
    saved: float
    bytes_are_least: bool
    num_messages: int
    bound_seconds: float
    links: Mapping[str, LinkStatistics]
    staging_bytes: int
    seconds: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanInput:
    """Sources by rank, receivers counted on from the last; devices are the ranks'."""

    specs: Mapping[str, TensorSpec]
    held: Mapping[int, Holding]
    needed: Mapping[int, Holding]


def plan_scenario(scenario: Scenario) -> Planned:
    """Plan one, and time it."""
    spec = read_model_spec(_CONFIGS / scenario.config)
    times = [time.process_time()]
    holdings = rank_holdings(spec, scenario.layout, vocab_multiple=128)
    specs = weight_specs(spec, "bfloat16", by_expert=True)
    times.append(time.process_time())
    workers = engine_needs(spec, scenario.tp)
    times.append(time.process_time())
    needed = {scenario.size + i: workers[i % scenario.tp] for i in range(scenario.size)}
    ends = _PlanInput(specs=specs, held=dict(enumerate(holdings)), needed=needed)
    shared = overlaps(ends.specs, ends.held, ends.needed)
    slots = _slots(shared, scenario.tp)
    times.append(time.process_time())
    hosts = {i: device // _DEVICES_PER_HOST for i, device in enumerate([*range(scenario.size), *slots])}
    neighbours = {scenario.size + i: [slot] for i, slot in enumerate(slots)}
    plan = build_plan(specs, ends.held, needed, neighbours=neighbours, hosts=hosts)
    times.append(time.process_time())
    return _describe(scenario, ends, plan, shared, slots, times)


def _slots(shared: np.ndarray, tp: int) -> list[int]:
    """Choose a device for each worker; engines stay on the devices that they have in order."""
    blocks = range(0, len(shared), tp)
    return [
        start + slot for start in blocks for slot in best_neighbours(shared[start : start + tp, start : start + tp])
    ]


def _describe(
    scenario: Scenario, ends: _PlanInput, plan: Plan, shared: np.ndarray, slots: Sequence[int], times: Sequence[float]
) -> Planned:
    size, beside = scenario.size, {scenario.size + i: slot for i, slot in enumerate(slots)}
    workers = {id(holding): holding for holding in ends.needed.values()}
    needs = {key: _num_bytes(ends.specs, holding) for key, holding in workers.items()}
    wanted = [needs[id(holding)] for holding in ends.needed.values()]
    lacking = [want - int(shared[i, slot]) for i, (want, slot) in enumerate(zip(wanted, slots, strict=True))]
    received = [plan.received_bytes(size + i) for i in range(size)]
    sent = [sum(message.num_bytes for message in plan.of_source(i) if not message.local) for i in range(size)]
    return Planned(
        name=scenario.name,
        trainer=scenario.trainer(),
        engines=scenario.engines(),
        num_tensors=len(ends.specs),
        model_bytes=sum(spec.num_bytes for spec in ends.specs.values()),
        received=_spread(received),
        sent=_spread(sent),
        saved_in_order=float(np.trace(shared)) / sum(wanted),
        saved=float(shared[np.arange(size), slots].sum()) / sum(wanted),
        bytes_are_least=received == lacking,
        num_messages=sum(not message.local for message in plan.messages),
        bound_seconds=_least_seconds(ends, beside, plan.hosts),
        links={name: link_statistics(plan, ways, hosts=plan.hosts, beside=beside) for name, ways in WAYS.items()},
        staging_bytes=most_staging(plan, SyncConfig(host_group="device", cuda_ipc=True)).device,
        seconds=(times[1] - times[0], times[2] - times[1], times[3] - times[2], times[4] - times[3]),
    )


def _num_bytes(specs: Mapping[str, TensorSpec], holding: Holding) -> int:
    return sum(sum(map(num_elements, boxes)) * specs[name].dtype.itemsize for name, boxes in holding.items())


def _spread(values: Sequence[int]) -> RankSpread:
    return RankSpread(least=min(values), mean=sum(values) / len(values), most=max(values))


def _least_seconds(ends: _PlanInput, beside: Mapping[int, int], hosts: Mapping[int, Any]) -> float:
    """The bound: see above."""
    replicas, rates = replicas_of(ends.needed), Rates()
    wanted = [Counter[frozenset[int]]() for _ in replicas]
    for _, group in alike_tensors(ends.specs, ends.held, dict(enumerate(holding for holding, _ in replicas))):
        for tensors, spec, held, needed in group:
            boxes, holders = tuple(held), list(held.values())
            for box, takers in needed.items():
                for piece in pieces(box, boxes):
                    able = frozenset(source for holder in piece.holders for source in holders[holder])
                    for taker in takers:
                        wanted[taker][able] += len(tensors) * num_elements(piece.box) * spec.dtype.itemsize
    on = {host: frozenset(rank for rank in ends.held if hosts[rank] == host) for host in hosts.values()}
    sent = {Medium.NVLINK: Counter[frozenset[int]](), Medium.NETWORK: Counter[frozenset[int]]()}
    most = Counter[Medium]()
    for (_, receivers), by_able in zip(replicas, wanted, strict=True):
        for receiver in receivers:
            received = Counter[Medium]()
            for able, num_bytes in by_able.items():
                if beside[receiver] not in able:
                    near = able & on[hosts[receiver]]
                    medium = Medium.NVLINK if near else Medium.NETWORK
                    received[medium] += num_bytes
                    sent[medium][near or able] += num_bytes
            most |= received
    for medium, by_able in sent.items():
        for able in by_able:
            alone = sum(num_bytes for others, num_bytes in by_able.items() if others <= able)
            most[medium] = max(most[medium], -(-alone // len(able)))
    return max(most[Medium.NVLINK] / rates.nvlink, most[Medium.NETWORK] / rates.network)


def planning(devices: Sequence[int]) -> tuple[dict[str, Any], bool]:
    """Plan the scenarios of that many devices and print them; the record, and whether all is as it must be."""
    scenarios = [scenario for scenario in SCENARIOS if scenario.size in devices]
    planned = []
    for scenario in scenarios:
        planned.append(plan_scenario(scenario))
        print("\n".join(_table(planned[-1:])), flush=True)
    for lines in (_table(planned), _links_table(planned)):
        print("\n".join(lines))
    holds = True
    for scenario, each in zip(scenarios, planned, strict=True):
        ratio = each.links["NCCL"].seconds / each.bound_seconds
        seconds, staging = sum(each.seconds), each.staging_bytes
        checks = {
            "every worker receives R_i": each.bytes_are_least,
            f"in turn {ratio:.3f} of the bound, limit {_MOST_WAITING}": ratio <= _MOST_WAITING,
            f"staging {staging / 2**20:,.0f} MiB a rank, limit {_MOST_STAGING >> 20:,}": staging <= _MOST_STAGING,
            f"planned in {seconds:.1f} s, limit {scenario.most_seconds:.0f} s": seconds < scenario.most_seconds,
        }
        for text, within in checks.items():
            print(f"{'holds' if within else 'FAILS'}  {each.name}, {each.trainer}, {each.engines}: {text}")
            holds = holds and within
    return {"planned": [asdict(each) for each in planned]}, holds


def _table(planned: Sequence[Planned]) -> list[str]:
    header = (
        "model|GB|trainer|engines|GB received|GB sent|saved, in order|messages|staging MiB|hold s|need s|place s|plan s"
    )
    rows: list[tuple[str, ...]] = [tuple(header.split("|"))]
    rows += [
        (
            each.name,
            f"{each.model_bytes / 1e9:.0f}",
            each.trainer,
            each.engines,
            str(each.received),
            str(each.sent),
            f"{each.saved:.1%}, {each.saved_in_order:.1%}",
            f"{each.num_messages:,}",
            f"{each.staging_bytes / 2**20:,.0f}",
            *(f"{seconds:.1f}" for seconds in each.seconds),
        )
        for each in planned
    ]
    return list(align(rows, left=(0, 2, 3)))


def _links_table(planned: Sequence[Planned]) -> list[str]:
    rows = [["model", "trainer", "over", *(f"GB {medium}" for medium in Medium), "seconds", "bound s"]]
    for each in planned:
        for name, links in each.links.items():
            sizes = [f"{load.num_bytes / 1e9:,.0f}, {load.busiest_bytes / 1e9:,.2f}" for load in links.loads]
            times = [f"{links.seconds:.3f}", f"{each.bound_seconds:.3f}"]
            rows.append([each.name, each.trainer, name, *sizes, *times])
    return list(align(rows, left=(0, 1, 2)))
