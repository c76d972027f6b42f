"""One rank of a resharding contender, for tools.bench.reshard: waits for its peers, reshards, reports as JSON.

Four ranks hold a tensor-parallel quarter each and want a half: tensor-parallel 4 to two replicas of 2, with ranks 0
and 1 on one half and 2 and 3 on the other, so that each has half of what it needs. Plans are made before the clock
starts, and all contenders begin with the same shards and end with the same.
"""

import functools
import importlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl.parallel.weights.bridge.boxes import Box, slices_of
from megarl.parallel.weights.bridge.ends import BridgeReceiver, BridgeSender
from megarl.parallel.weights.bridge.plan import Message, build_plan
from megarl.parallel.weights.bridge.point_to_point import PointToPointReceiver, PointToPointSender, open_group
from megarl.parallel.weights.bridge.shared_memory import SharedMemoryReceiver, SharedMemorySender
from megarl.parallel.weights.bridge.wires import Share
from megarl.parallel.weights.collective import Meeting
from megarl.parallel.weights.slices import Slice
from megarl.safetensors_map import TensorSpec

NUM_RANKS, NUM_HALVES = 4, 2
HALVES = ((0, 2), (1, 3))
# Name → shape in units of the width, and the axis that tensor parallelism splits.
LAYER = {"qkv": ((3, 1), 0), "proj": ((1, 1), 1), "fc1": ((4, 1), 0), "fc2": ((1, 4), 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A contender's run, the same for all ranks. `bucket_mib` is megarl's."""

    contender: str
    width: int
    num_layers: int
    rounds: int
    bucket_mib: int
    port: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Of one rank: what it received from others, messages it sent, memory beyond its shards, time of a round."""

    wire_bytes: int
    messages: int
    staging_bytes: int
    seconds: float
    plan_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A rank's shards: a quarter of every tensor, and room for a half."""

    specs: Mapping[str, TensorSpec]
    axes: Mapping[str, int]
    rank: int
    quarters: Mapping[str, torch.Tensor]
    halves: Mapping[str, torch.Tensor]

    def box(self, name: str, place: int, count: int) -> Box:
        """The `place`-th of `count` equal parts of a tensor."""
        shape, axis = self.specs[name].shape, self.axes[name]
        length = shape[axis] // count
        return tuple((place * length, (place + 1) * length) if i == axis else (0, n) for i, n in enumerate(shape))

    def quarter(self, name: str, rank: int) -> Box:
        return self.box(name, rank, NUM_RANKS)

    def half(self, name: str, rank: int) -> Box:
        return self.box(name, rank * NUM_HALVES // NUM_RANKS, NUM_HALVES)


def full_tensor(index: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Values that tell every position of every tensor apart."""
    generator = torch.Generator().manual_seed(index)
    return torch.rand(shape, generator=generator)


def make_model(job: Job, rank: int) -> Model:
    specs, axes = dict[str, TensorSpec](), dict[str, int]()
    for layer in range(job.num_layers):
        for name, (units, axis) in LAYER.items():
            shape = tuple(job.width * unit for unit in units)
            specs[f"layers.{layer}.{name}"] = TensorSpec(shape=shape, dtype=torch.float32)
            axes[f"layers.{layer}.{name}"] = axis
    model = Model(specs=specs, axes=axes, rank=rank, quarters={}, halves={})
    quarters = {
        name: full_tensor(i, spec.shape)[slices_of(model.quarter(name, rank))].clone()
        for i, (name, spec) in enumerate(specs.items())
    }
    halves = {name: torch.zeros([b - a for a, b in model.half(name, rank)]) for name in specs}
    # Zeros are not in memory until they are written.
    for tensor in halves.values():
        tensor.fill_(-1.0)
    return Model(specs=specs, axes=axes, rank=rank, quarters=quarters, halves=halves)


def check(model: Model, rounds: int) -> None:
    """Every round adds one to the quarters."""
    for i, (name, spec) in enumerate(model.specs.items()):
        expected = full_tensor(i, spec.shape)[slices_of(model.half(name, model.rank))].clone()
        for _ in range(rounds):
            expected += 1.0
        assert torch.equal(model.halves[name], expected), f"{name} arrived wrong"


# --- contenders: each plans, and returns what reshards and what it sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`reshard` runs one round; `traffic` says (bytes received from others, messages sent) of it."""

    reshard: Callable[[], None]
    traffic: Callable[[], tuple[int, int]]


def bridge(wire: str, job: Job, model: Model) -> Contender:
    """megarl's plan and ends. What is local is copied from shard to shard, since both are in this process."""
    held = {rank: {name: model.quarter(name, rank) for name in model.specs} for rank in range(NUM_RANKS)}
    needed = {rank: {name: model.half(name, rank) for name in model.specs} for rank in range(NUM_RANKS)}
    plan = build_plan(
        model.specs,
        held,
        needed,
        neighbours={rank: [rank] for rank in range(NUM_RANKS)},
        bucket_bytes=job.bucket_mib << 20,
    )
    rank, quarter, half = model.rank, held[model.rank], needed[model.rank]

    def share(messages: list[Message]) -> Share:
        meeting = Meeting(address="127.0.0.1", port=job.port + 1, rank=rank, size=NUM_RANKS, timeout_s=60.0)
        wire_only = tuple(message for message in messages if not message.local)
        return Share(
            messages=wire_only,
            specs=plan.specs,
            needs={},
            segments=f"{job.directory}/segment",
            meeting=meeting,
            hosts=("here",) * NUM_RANKS,
        )

    outgoing, incoming = share(plan.of_source(rank)), share(plan.of_sink(rank))
    sender, receiver = _ends(wire, outgoing, incoming)
    local = [part for message in plan.of_sink(rank) if message.local for part in message.parts]
    boxes = dict[str, list[Box]]()
    for part in (part for message in incoming.messages for part in message.parts):
        boxes.setdefault(part.tensor, []).append(part.box)
    slices = [
        Slice(tensor=name, index=slices_of(quarter[name]), view=view, owned=True)
        for name, view in model.quarters.items()
    ]
    turns = iter(range(1 << 30))

    def reshard() -> None:
        turn = next(turns)
        sending = threading.Thread(target=sender.send, args=(slices, turn), kwargs={"with_checksums": False})
        sending.start()
        for part in local:
            target = model.halves[part.tensor][slices_of(part.box, half[part.tensor])]
            target.copy_(model.quarters[part.tensor][slices_of(part.box, quarter[part.tensor])])
        for name, tensor in receiver.receive(turn):
            for box in boxes[name]:
                model.halves[name][slices_of(box, half[name])].copy_(tensor[slices_of(box)])
        sending.join()

    return Contender(reshard=reshard, traffic=lambda: (receiver.wire_bytes, len(outgoing.messages)))


def _ends(wire: str, outgoing: Share, incoming: Share) -> tuple[BridgeSender, BridgeReceiver]:
    cpu = torch.device("cpu")
    if wire == "shared_memory":
        source, sink = SharedMemorySender(outgoing), SharedMemoryReceiver(incoming)
        return BridgeSender(outgoing, source), BridgeReceiver(incoming, sink, cpu)
    group = open_group(outgoing)
    sending, receiving = PointToPointSender(outgoing, group), PointToPointReceiver(incoming, group)
    return BridgeSender(outgoing, sending), BridgeReceiver(incoming, receiving, cpu)


def megatron(job: Job, model: Model) -> Contender:
    """megatron-core's centralized plan over its own gloo service."""
    # Its service makes a CUDA stream that it does not need between CPU tensors.
    torch.cuda.Stream = lambda: None  # type: ignore[misc, assignment]
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
    from megatron.core.resharding.execution import execute_reshard_plan
    from megatron.core.resharding.planner import build_centralized_reshard_plan

    source = _module(model, model.quarters, [list(range(NUM_RANKS))], [[i] for i in range(NUM_RANKS)])
    target = _module(model, model.halves, [list(half) for half in HALVES], [[0, 1], [2, 3]])
    plan = build_centralized_reshard_plan(source, target)
    service, counted = GlooCopyService(), list[tuple[int, int]]()
    batch = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        received = sum(op.tensor.nbytes for op in operations if op.op is dist.irecv)
        counted.append((received, sum(op.op is dist.isend for op in operations)))
        return batch(operations)

    dist.batch_isend_irecv = counting  # type: ignore[assignment]
    return Contender(reshard=lambda: execute_reshard_plan(plan, source, target, service), traffic=lambda: counted[-1])


def _module(
    model: Model, shards: Mapping[str, torch.Tensor], tp_groups: list[list[int]], dp_groups: list[list[int]]
) -> torch.nn.Module:
    """A module with megatron-core's marks of tensor parallelism; parameters are the shards themselves."""

    def mine(groups: list[list[int]]) -> Any:
        made = [(ranks, dist.new_group(ranks)) for ranks in groups]
        return next(group for ranks, group in made if model.rank in ranks)

    module = torch.nn.Module()
    for name, shard in shards.items():
        parameter = torch.nn.Parameter(shard, requires_grad=False)
        parameter.tensor_model_parallel, parameter.partition_dim = True, model.axes[name]  # type: ignore[attr-defined]
        module.register_parameter(name.replace(".", "_"), parameter)
    groups = SimpleNamespace(tp=mine(tp_groups), dp=mine(dp_groups), ep=None, pp=mine([[i] for i in range(NUM_RANKS)]))
    module.pg_collection = groups  # type: ignore[assignment]
    return module


def all_gather(job: Job, model: Model) -> Contender:
    """Every tensor gathered on every rank, which keeps its half."""

    def reshard() -> None:
        for name, shard in model.quarters.items():
            gathered = [torch.empty_like(shard) for _ in range(NUM_RANKS)]
            dist.all_gather(gathered, shard)
            full = torch.cat(gathered, dim=model.axes[name])
            model.halves[name].copy_(full[slices_of(model.half(name, model.rank))])

    received = (NUM_RANKS - 1) * sum(shard.nbytes for shard in model.quarters.values())
    return Contender(reshard=reshard, traffic=lambda: (received, len(model.quarters)))


CONTENDERS: dict[str, Callable[[Job, Model], Contender]] = {
    "megarl, shared memory": functools.partial(bridge, "shared_memory"),
    "megarl, gloo": functools.partial(bridge, "gloo"),
    "megatron-core": megatron,
    "all-gather": all_gather,
}


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def rounds(contender: Contender, model: Model, count: int) -> Iterator[float]:
    """Seconds of each round; the quarters change before it."""
    for _ in range(count):
        for shard in model.quarters.values():
            shard.add_(1.0)
        dist.barrier()
        began = time.perf_counter()
        contender.reshard()
        dist.barrier()
        yield time.perf_counter() - began


def run(job: Job, rank: int) -> RankResult:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{job.port}", rank=rank, world_size=NUM_RANKS)
    # Where the bridge's ends meet.
    store = dist.TCPStore("127.0.0.1", job.port + 1, is_master=True, wait_for_workers=False) if rank == 0 else None
    model = make_model(job, rank)
    if job.contender == "megatron-core":
        # Its imports take longer than its plan.
        importlib.import_module("megatron.core.resharding.planner")
    dist.barrier()
    began = time.perf_counter()
    contender = CONTENDERS[job.contender](job, model)
    plan_seconds = time.perf_counter() - began
    dist.barrier()
    # What is held so far is no staging; the peak starts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    seconds = list(rounds(contender, model, job.rounds))
    staging = resident_bytes("VmHWM") - before
    received, messages = contender.traffic()
    check(model, job.rounds)
    dist.barrier()
    del store
    return RankResult(
        wire_bytes=received,
        messages=messages,
        staging_bytes=staging,
        seconds=statistics.median(seconds),
        plan_seconds=plan_seconds,
    )


def main() -> None:
    torch.set_num_threads(1)
    job = Job(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(run(job, int(sys.argv[2])))))


if __name__ == "__main__":
    main()
