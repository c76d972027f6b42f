"""One rank of a weight sync, for megarl_lab.bench.sync: waits for its peers, moves the weights, reports as JSON.

Plans are made before the clock starts. All contenders begin with the same shards and end with the same. megarl's
receivers get tensors of full shape, as engines do (`BridgeReceiver`), and copy their part out of them, as loaders do.
"""

import functools
import importlib
import itertools
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.generation import SyncConfig
from megarl.host.store import open_store
from megarl.sync.plan.build import Plan, WeightMessage, build_plan
from megarl.sync.transport.ends import BridgeReceiver, BridgeSender
from megarl.sync.transport.process_plans import process_plans_of
from megarl.sync.transport.rendezvous import Rendezvous
from megarl.sync.transport.routed import RoutedReceiver, RoutedSender
from megarl.sync.transport.transports import ProcessPlan
from megarl.weights.boxes import Box, Index, slices_of
from megarl.weights.slices import Slice
from megarl_lab.bench.memory import ResidentMemory
from megarl_lab.bench.sync_model import NUM_RANKS, Model, RankLayout, check, make_model, one_each, shards

TIMEOUT_S = 300.0
CPU = torch.device("cpu")
# Those that this process has opened, which last as long as it.
_stores: list[dist.TCPStore] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncJob:
    """The same for all ranks. A round of each contender in turn, `rounds` times after one that does not count."""

    contenders: tuple[str, ...]
    case: str
    width: int
    num_layers: int
    rounds: int
    port: int
    directory: str
    bucket_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The costs of one rank and contender: what it received, messages it sent, memory beyond its shards, and the
    time of a round.
    """

    wire_bytes: int
    messages: int
    staging_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank with its shards before and after."""

    job: SyncJob
    number: int
    model: Model
    held: Mapping[str, torch.Tensor]
    got: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncContender:
    """`sync` runs one round; `traffic` says (bytes received from others, messages sent) of it."""

    sync: Callable[[], None]
    traffic: Callable[[], tuple[int, int]]


def plan_of(model: Model, bucket_bytes: int | None) -> Plan:
    """Every rank is a source, and a receiver beside it."""
    ranks = range(NUM_RANKS)
    return build_plan(
        model.specs,
        {rank: one_each(model.held(rank)) for rank in ranks},
        {NUM_RANKS + rank: one_each(model.wanted(rank)) for rank in ranks},
        neighbours={NUM_RANKS + rank: [rank] for rank in ranks},
        bucket_bytes=bucket_bytes,
    )


def bridge(transport: str, rank: Rank) -> SyncContender:
    """megarl's plan, its ends and a transport. Local parts are copied from shard to shard."""
    plan = plan_of(rank.model, rank.job.bucket_bytes)
    held, wanted = rank.model.held(rank.number), rank.model.wanted(rank.number)
    outgoing, source, incoming, receiver = _ends(rank, plan, transport)
    sender = BridgeSender(outgoing, source)
    slices = [
        Slice(tensor=name, index=slices_of(held[name]), view=view, owned=True) for name, view in rank.held.items()
    ]
    local = [
        (rank.got[part.tensor][slices_of(part.box, wanted[part.tensor])],
         rank.held[part.tensor][slices_of(part.box, held[part.tensor])])
        for message in plan.of_receiver(NUM_RANKS + rank.number) if message.local for part in message.parts
    ]  # fmt: skip
    loads = loads_of(incoming.messages, rank.got, wanted)
    turns = itertools.count()
    whole = BridgeReceiver(incoming, receiver, CPU)

    def sync() -> None:
        turn = next(turns)
        sending = threading.Thread(target=sender.send, args=(slices, turn), kwargs={"with_checksums": False})
        sending.start()
        for target, mine in local:
            target.copy_(mine)
        for name, tensor in whole.receive(turn):
            for target, index in loads[name]:
                target.copy_(tensor[index])
        sending.join()

    received = sum(message.num_bytes for message in incoming.messages)
    return SyncContender(sync=sync, traffic=lambda: (received, len(outgoing.messages)))


def loads_of(
    messages: Sequence[WeightMessage], got: Mapping[str, torch.Tensor], wanted: Mapping[str, Box]
) -> dict[str, list[tuple[torch.Tensor, Index]]]:
    """Tensor → where in shards, and from where in the tensor of full shape, what messages bring of it is copied."""
    loads = defaultdict[str, list[tuple[torch.Tensor, Index]]](list)
    for part in itertools.chain.from_iterable(message.parts for message in messages):
        target = got[part.tensor][slices_of(part.box, wanted[part.tensor])]
        loads[part.tensor].append((target, slices_of(part.box)))
    return loads


def _ends(rank: Rank, plan: Plan, transport: str) -> tuple[ProcessPlan, RoutedSender, ProcessPlan, RoutedReceiver]:
    """Both ends of this process, which are members of their own: for gloo each process is a host."""
    job, timeout = rank.job, timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timeout)
    if rank.number == 0:
        # One for every bridge, as in a run: two groups cannot meet at the same keys.
        _stores.append(open_store("127.0.0.1"))
        store.set(f"port of {transport}", str(_stores[-1].port))
    port = int(store.get(f"port of {transport}"))

    shares = process_plans_of(
        replace(plan, messages=tuple(message for message in plan.messages if not message.local)),
        SyncConfig(),
        Rendezvous(
            address=f"tcp://127.0.0.1:{port}",
            rank=0,
            size=2 * NUM_RANKS,
            timeout_s=TIMEOUT_S,
            secret=b"the benchmark's",
        ),
        hosts=["here" if transport == "shared_memory" else f"host {i % NUM_RANKS}" for i in range(2 * NUM_RANKS)],
        num_ranks=NUM_RANKS,
        beside={},
        segments=Path(job.directory) / transport,
    )
    outgoing, incoming = shares[rank.number], shares[NUM_RANKS + rank.number]
    with ThreadPoolExecutor(2) as pool:
        # They wait for each other.
        source = pool.submit(RoutedSender, outgoing, CPU)
        receiver = pool.submit(RoutedReceiver, incoming, CPU)
        return outgoing, source.result(), incoming, receiver.result()


def megatron(rank: Rank) -> SyncContender:
    """megatron-core's centralized plan over its own gloo service."""
    # Its service makes a CUDA stream that it does not need between CPU tensors.
    torch.cuda.Stream = lambda: None  # type: ignore[misc, assignment]
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
    from megatron.core.resharding.execution import execute_reshard_plan
    from megatron.core.resharding.planner import build_centralized_reshard_plan

    source = _module(rank, rank.held, rank.model.source)
    target = _module(rank, rank.got, rank.model.receiver)
    plan = build_centralized_reshard_plan(source, target)
    service, counted = GlooCopyService(), list[tuple[int, int]]()
    batch = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        received = sum(op.tensor.nbytes for op in operations if op.op is dist.irecv)
        counted.append((received, sum(op.op is dist.isend for op in operations)))
        return batch(operations)

    dist.batch_isend_irecv = counting  # type: ignore[assignment]
    return SyncContender(
        sync=lambda: execute_reshard_plan(plan, source, target, service),
        traffic=lambda: counted[-1] if counted else (0, 0),
    )


def _module(rank: Rank, parts: Mapping[str, torch.Tensor], layout: RankLayout) -> torch.nn.Module:
    """Wrap shards as the parameters of a module, with megatron-core's tensor-parallel attributes."""

    def mine(groups: Sequence[Sequence[int]]) -> Any:
        made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
        return next(group for ranks, group in made if rank.number in ranks)

    module = torch.nn.Module()
    for name, shard in parts.items():
        parameter = torch.nn.Parameter(shard, requires_grad=False)
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = rank.model.axes[name]  # type: ignore[attr-defined]
        module.register_parameter(name.replace(".", "_"), parameter)
    across = list(zip(*layout.groups, strict=True))
    alone = [(i,) for i in range(NUM_RANKS)]
    dp, pp = (alone, across) if layout.stages else (across, alone)
    module.pg_collection = SimpleNamespace(  # type: ignore[assignment]
        tp=mine(layout.groups), dp=mine(dp), ep=None, pp=mine(pp)
    )
    return module


CONTENDERS: dict[str, Callable[[Rank], SyncContender]] = {
    "megarl, shared memory": functools.partial(bridge, "shared_memory"),
    "megarl, gloo": functools.partial(bridge, "gloo"),
    "megatron-core": megatron,
}


def open_rank(job: SyncJob, number: int) -> Rank:
    """Join the others; hold what the layout says, in memory, and room for what comes."""
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=number, world_size=NUM_RANKS)
    model = make_model(job.case, job.width, job.num_layers)
    got = {
        name: torch.full([end - start for start, end in box], torch.nan) for name, box in model.wanted(number).items()
    }
    return Rank(job=job, number=number, model=model, held=shards(model, number), got=got)


def run(job: SyncJob, number: int) -> dict[str, RankResult]:
    """Every contender's rounds, in turn."""
    rank = open_rank(job, number)
    if "megatron-core" in job.contenders:
        # Its imports take longer than its plan.
        importlib.import_module("megatron.core.resharding.planner")
    contenders = dict[str, SyncContender]()
    for name in job.contenders:
        dist.barrier()
        contenders[name] = CONTENDERS[name](rank)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    dist.barrier()
    memory = ResidentMemory()
    memory.begin()
    for _, (name, contender) in itertools.product(range(job.rounds + 1), contenders.items()):
        for shard in rank.held.values():
            shard.add_(1.0)
        dist.barrier()
        began = time.perf_counter()
        contender.sync()
        dist.barrier()
        seconds[name].append(time.perf_counter() - began)
    staging = memory.peak_bytes()
    check(rank.model, number, rank.got, float(len(contenders) * (job.rounds + 1)))
    dist.barrier()
    return {
        name: RankResult(
            wire_bytes=contender.traffic()[0],
            messages=contender.traffic()[1],
            staging_bytes=staging,
            seconds=statistics.median(seconds[name][1:] or seconds[name]),
        )
        for name, contender in contenders.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    job = SyncJob(**json.loads(sys.argv[1]))
    results = run(job, int(sys.argv[2]))
    print(json.dumps({name: asdict(result) for name, result in results.items()}))


if __name__ == "__main__":
    main()
