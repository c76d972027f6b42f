"""Measure plans of large models: bytes by rank, what placement saves, the least time, and the time to plan.

Nothing is moved: what ranks hold and engines need is worked out from published sizes. The least time of a transfer is

    T ≥ max over ranks of (received ÷ B, sent ÷ B)

with B of the network for bytes between hosts and of NVLink for those within one. "In turn" is the time if every device
sends one message at a time and receives one at a time, in the plan's order: they wait for each other, as a real wire
does in part.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cluster.sync_plan import rank_holdings
from megarl.config.schema import LayoutConfig
from megarl.record.text_table import align
from megarl.sync.plan.assign import Holding
from megarl.sync.plan.build import Plan, build_plan
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.plan.neighbours import best_neighbours, overlaps
from megarl.weights.boxes import num_elements
from megarl.weights.families import read_model_spec
from megarl.weights.safetensors_map import TensorSpec, weight_specs

_CONFIGS = Path(__file__).parents[2] / "configs" / "model" / "hf"
_DEVICES_PER_HOST = 8
# Bytes a second in each direction of a device: 400 Gb/s between hosts, NVLink 4 within.
_NETWORK, _NVLINK = 400e9 / 8, 450e9
# In turn, of the bound.
_MOST_WAITING = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model, its trainer's layout, and engines of `tp` workers on the same devices; most_seconds: CPU to plan it."""

    name: str
    config: str
    layout: LayoutConfig
    tp: int
    expert_parallel: bool = False
    most_seconds: float = 6.0

    @property
    def size(self) -> int:
        return self.layout.world_size

    @property
    def num_engines(self) -> int:
        return self.size // self.tp

    def trainer(self) -> str:
        return f"{self.size}: TP{self.layout.tp} PP{self.layout.pp} DP{self.layout.dp} EP{self.layout.ep}"

    def engines(self) -> str:
        return f"{self.num_engines} × TP{self.tp}{' and EP' if self.expert_parallel else ''}"


_V3 = LayoutConfig(pp=16, dp=16, ep=16, first_stage_layers=3, last_stage_layers=2)
SCENARIOS = (
    Scenario(name="Qwen3-30B-A3B", config="qwen3-30b-a3b", layout=LayoutConfig(tp=4, pp=2, dp=2, ep=8), tp=2),
    Scenario(
        name="Qwen3-235B-A22B",
        config="qwen3-235b-a22b",
        layout=LayoutConfig(tp=4, pp=8, dp=4, ep=16, first_stage_layers=11, last_stage_layers=11),
        tp=8,
    ),
    Scenario(name="DeepSeek-V3 671B", config="deepseek-v3", layout=_V3, tp=16),
    Scenario(name="DeepSeek-V3 671B", config="deepseek-v3", layout=_V3, tp=16, expert_parallel=True),
    Scenario(
        name="DeepSeek-V3 671B",
        config="deepseek-v3",
        layout=LayoutConfig(tp=8, pp=8, dp=8, ep=64, first_stage_layers=7, last_stage_layers=6),
        tp=16,
        most_seconds=20.0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpread:
    """Of bytes over ranks."""

    least: int
    mean: float
    most: int

    def __str__(self) -> str:
        return " / ".join(f"{each / 1e9:.2f}" for each in (self.least, self.mean, self.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The figures of a plan.

    saved: the part of what workers need that their own devices hold, with workers in the order of ranks and where they
    overlap most within their engine. seconds: of CPU, for what ranks hold, what workers need, placement, and the plan;
    all in one thread.
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
    in_turn_seconds: float
    seconds: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Sources by rank, sinks counted on from the last; devices are the ranks'."""

    specs: Mapping[str, TensorSpec]
    held: Mapping[int, Holding]
    needed: Mapping[int, Holding]


def plan_scenario(scenario: Scenario) -> Planned:
    """Plan one, and time it."""
    spec = read_model_spec(_CONFIGS / scenario.config)
    times = [time.process_time()]
    holdings = rank_holdings(spec, scenario.layout, vocab_multiple=128)
    specs = weight_specs(spec, "bfloat16")
    times.append(time.process_time())
    workers = engine_needs(spec, scenario.tp, expert_parallel=scenario.expert_parallel)
    times.append(time.process_time())
    needed = {scenario.size + i: workers[i % scenario.tp] for i in range(scenario.size)}
    ends = _Ends(specs=specs, held=dict(enumerate(holdings)), needed=needed)
    shared = overlaps(ends.specs, ends.held, ends.needed)
    seats = _seats(shared, scenario.tp)
    times.append(time.process_time())
    plan = build_plan(
        specs,
        ends.held,
        needed,
        neighbours={scenario.size + i: [seat] for i, seat in enumerate(seats)},
        hosts={i: device // _DEVICES_PER_HOST for i, device in enumerate([*range(scenario.size), *seats])},
    )
    times.append(time.process_time())
    return _describe(scenario, ends, plan, shared, seats, times)


def _seats(shared: np.ndarray, tp: int) -> list[int]:
    """Of each worker a device; engines stay on the devices that they have in order."""
    blocks = range(0, len(shared), tp)
    return [
        start + seat for start in blocks for seat in best_neighbours(shared[start : start + tp, start : start + tp])
    ]


def _describe(
    scenario: Scenario, ends: _Ends, plan: Plan, shared: np.ndarray, seats: Sequence[int], times: Sequence[float]
) -> Planned:
    size = scenario.size
    workers = {id(holding): holding for holding in ends.needed.values()}
    needs = {key: _num_bytes(ends.specs, holding) for key, holding in workers.items()}
    wanted = [needs[id(holding)] for holding in ends.needed.values()]
    lacking = [want - int(shared[i, seat]) for i, (want, seat) in enumerate(zip(wanted, seats, strict=True))]
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
        saved=float(shared[np.arange(size), seats].sum()) / sum(wanted),
        bytes_are_least=received == lacking,
        num_messages=sum(not message.local for message in plan.messages),
        bound_seconds=_bound(plan, size, seats),
        in_turn_seconds=_in_turn(plan, size, seats),
        seconds=(times[1] - times[0], times[2] - times[1], times[3] - times[2], times[4] - times[3]),
    )


def _num_bytes(specs: Mapping[str, TensorSpec], holding: Holding) -> int:
    return sum(num_elements(box) * specs[name].dtype.itemsize for name, box in holding.items())


def _spread(values: Sequence[int]) -> RankSpread:
    return RankSpread(least=min(values), mean=sum(values) / len(values), most=max(values))


def _bound(plan: Plan, size: int, seats: Sequence[int]) -> float:
    """The least time: of every device's bytes in and out, between hosts and within one."""
    # [in or out, within or between, device]
    traffic = np.zeros((2, 2, size))
    for source, device, num_bytes in _on_the_wire(plan, size, seats):
        between = int(_is_between_hosts(source, device))
        traffic[0, between, device] += num_bytes
        traffic[1, between, source] += num_bytes
    return float((traffic / np.array([_NVLINK, _NETWORK])[None, :, None]).max())


def _in_turn(plan: Plan, size: int, seats: Sequence[int]) -> float:
    """The time if a message begins when its source has sent and its sink has received all of theirs before it."""
    sent, received = [0.0] * size, [0.0] * size
    for source, device, num_bytes in _on_the_wire(plan, size, seats):
        speed = _NETWORK if _is_between_hosts(source, device) else _NVLINK
        sent[source] = received[device] = max(sent[source], received[device]) + num_bytes / speed
    return max(*sent, *received)


def _on_the_wire(plan: Plan, size: int, seats: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """From which device to which, and how many bytes: every message, in the plan's order."""
    for message in plan.messages:
        if not message.local:
            yield message.source, seats[message.sink - size], message.num_bytes


def _is_between_hosts(source: int, device: int) -> bool:
    return source // _DEVICES_PER_HOST != device // _DEVICES_PER_HOST


def planning() -> tuple[dict[str, Any], bool]:
    """Plan all scenarios and print them; the record, and whether all is as it must be."""
    planned = []
    for scenario in SCENARIOS:
        planned.append(plan_scenario(scenario))
        print("\n".join(_table(planned[-1:])), flush=True)
    print("\n".join(_table(planned)))
    holds = True
    for scenario, each in zip(SCENARIOS, planned, strict=True):
        ratio, seconds = each.in_turn_seconds / each.bound_seconds, sum(each.seconds)
        checks = {
            "every worker receives R_i": each.bytes_are_least,
            f"in turn {ratio:.3f} of the bound, limit {_MOST_WAITING}": ratio <= _MOST_WAITING,
            f"planned in {seconds:.1f} s, limit {scenario.most_seconds:.0f} s": seconds < scenario.most_seconds,
        }
        for text, within in checks.items():
            print(f"{'holds' if within else 'FAILS'}  {each.name}, {each.trainer}, {each.engines}: {text}")
            holds = holds and within
    return {"planned": [asdict(each) for each in planned]}, holds


def _table(planned: Sequence[Planned]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        (
            "model",
            "GB",
            "trainer",
            "engines",
            "GB received",
            "GB sent",
            "saved, in order",
            "messages",
            "bound s",
            "in turn s",
            "hold s",
            "need s",
            "place s",
            "plan s",
        )
    ]
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
            f"{each.bound_seconds:.2f}",
            f"{each.in_turn_seconds:.2f}",
            *(f"{seconds:.1f}" for seconds in each.seconds),
        )
        for each in planned
    ]
    return list(align(rows, left=(0, 2, 3)))
