"""What the GPU tests run in processes of their own: training, offloading, and an engine that sleeps."""

import importlib.util
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.cluster import offloading
from megarl.config.generation import SyncConfig
from megarl.config.schema import ActorConfig, ModelConfig
from megarl.host.device.platform import platform
from megarl.host.store import open_store
from megarl.parallel.backend import BACKENDS, cuda_backend
from megarl.rollout.engine import Completion, GenerationRequest, VllmEngine
from megarl.rollout.engine_spec import EngineSpec
from megarl.sync.plan.build import build_plan
from megarl.sync.transport.ends import BridgeReceiver, BridgeSender
from megarl.sync.transport.process_plans import process_plans_of
from megarl.sync.transport.rendezvous import Rendezvous
from megarl.sync.transport.routed import RoutedReceiver, RoutedSender
from megarl.sync.transport.transports import ProcessPlan
from megarl.types import FloatArray, Row
from megarl.types.messages import ForwardRequest, LoadRequest, Part, Role, RoleSpec
from megarl.weights.boxes import full_box
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.slices import Slice
from tests.e2e.engines import load_files
from tests.helpers.offload_ranks import History, open_trained
from tests.helpers.rank_pool import RankContext
from tests.helpers.ranks import join_layout
from tests.helpers.waiting import wait_until


def use_local_layers(context: RankContext) -> None:
    """Models of this process are built from megarl's own layers: Transformer Engine has no packed float32 attention."""
    BACKENDS["cuda"] = cuda_backend(transformer_engine=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Loss and gradient norm by step, the device of all parameters, and the package of the attention layers."""

    history: History
    devices: set[str]
    attention: set[str]


def train(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row], num_steps: int
) -> Training:
    """SFT steps."""
    worker, history = open_trained(context, actor, model, rows, num_steps)
    (chunk,) = worker.roles[Role.ACTOR].chunks
    layers = [layer for name, layer in chunk.named_modules() if name.endswith("core_attention")]
    return Training(
        history=history,
        devices={parameter.device.type for parameter in chunk.parameters()},
        attention={type(layer).__module__.split(".")[0] for layer in layers},
    )


def expected_attention(context: RankContext) -> str:
    """The package whose attention the platform chooses here."""
    return "megatron" if importlib.util.find_spec("transformer_engine") is not None else "megarl"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMemory:
    """Bytes that tensors hold on the device, and those that the allocator has handed out: before, away, back."""

    released: int
    held: tuple[int, int, int]
    allocated: tuple[int, int, int]


def memory_around_offload(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row]
) -> dict[Part, PartMemory]:
    """Every part of a trained actor away and back, one after the other."""
    worker, _ = open_trained(context, actor, model, rows, 2)
    measured = {}
    for part in Part:
        seen = [_device_memory()]
        released = worker.offload(Role.ACTOR, [part])
        seen.append(_device_memory())
        worker.onload(Role.ACTOR, [part])
        seen.append(_device_memory())
        held, allocated = ((a, b, c) for a, b, c in zip(*seen, strict=True))
        measured[part] = PartMemory(released=released, held=held, allocated=allocated)
    return measured


def _device_memory() -> tuple[int, int]:
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"], torch.cuda.memory_allocated()


@dataclass(slots=True)
class Recorder:
    """Stands in for the trainer's side of the ledger and passes the engine's on; notes what is asked, in order."""

    engine: VllmEngine
    calls: list[str] = field(default_factory=list)

    def offload(self, role: Role, parts: Sequence[Part]) -> int:
        self.calls.append(f"offload {role}.{'+'.join(parts)}")
        return 0

    def onload(self, role: Role, parts: Sequence[Part]) -> None:
        self.calls.append(f"onload {role}.{'+'.join(parts)}")

    def sleep(self) -> bool:
        self.calls.append("sleep")
        return self.engine.sleep()

    def wake(self, parts: Sequence[str]) -> None:
        self.calls.append(f"wake {'+'.join(parts)}")
        self.engine.wake(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepTrace:
    """What the ledger asked for, free bytes of the device after each phase, log-probs before sleep and after."""

    calls: list[str]
    free: dict[str, int]
    before: list[FloatArray]
    after: list[FloatArray]


def sleep_and_wake(
    context: RankContext, spec: EngineSpec, role: RoleSpec, files: Sequence[str], sequences: Sequence[Sequence[int]]
) -> SleepTrace:
    """An engine through load, sync (with the weights of `files`) and generate, as a run's ledger leads it."""
    with _engine(spec) as engine:
        recorder, free = Recorder(engine), {"awake": _free_bytes()}
        ledger = offloading.MemoryLedger(recorder, recorder, enabled=True)
        before = engine.prompt_logprobs(sequences)
        ledger.enter(offloading.LOAD)
        free["load"] = _free_bytes()
        ledger.add(offloading.built_parts([role]))
        ledger.enter(offloading.SYNC)
        load_files(engine, files, version=1)
        free["sync"] = _free_bytes()
        ledger.enter(offloading.GENERATE)
        free["generate"] = _free_bytes()
        after = engine.prompt_logprobs(sequences)
    return SleepTrace(calls=recorder.calls, free=free, before=before, after=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTrace:
    """Seconds until the engine was there, what it generated at first, and what it was generating during an update."""

    start_s: float
    first: list[Completion]
    updated: list[Completion]


def update_in_flight(
    context: RankContext, spec: EngineSpec, files: Sequence[str], requests: Sequence[GenerationRequest]
) -> UpdateTrace:
    """Generate requests; then again, with the weights of `files` from some token on as version 1."""
    start = time.monotonic()
    with _engine(spec) as engine, ThreadPoolExecutor(1) as pool:
        start_s = time.monotonic() - start
        first = engine.generate(requests)
        engine.add(dict(enumerate(requests)))
        found: dict[int, Completion] = {}

        def serve() -> None:
            for reply in engine.serve():
                found.update(reply.completions)
                if len(found) == len(requests):
                    return

        serving = pool.submit(serve)
        wait_until(lambda: len(engine.unfinished()) == len(requests), "all requests", seen=engine.unfinished)
        load_files(engine, files, version=1)
        serving.result(timeout=120.0)
    return UpdateTrace(start_s=start_s, first=first, updated=[found[i] for i in range(len(requests))])


@contextmanager
def _engine(spec: EngineSpec) -> Iterator[VllmEngine]:
    # On CUDA vLLM's engine is a process of its own, to which tests send functions of theirs, and which the daemons that
    # ranks are could not start.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    engine = VllmEngine(spec)
    try:
        yield engine
    finally:
        engine.close()


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free: Any = torch.cuda.mem_get_info()[0]
    return int(free)


def exchange_on_device(
    context: RankContext, values: Mapping[str, torch.Tensor], directory: str, wire: str
) -> list[dict[str, torch.Tensor]]:
    """What another process on this device receives of tensors over CUDA IPC or shared memory, twice; between transfers
    all bits are flipped.
    """
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    store = open_store("127.0.0.1")
    specs = {name: TensorSpec(shape=tuple(value.shape), dtype=value.dtype) for name, value in values.items()}
    boxes = {name: (full_box(spec.shape),) for name, spec in specs.items()}
    plan = build_plan(specs, {0: boxes}, {1: boxes}, neighbours={1: [0]}, bucket_bytes=1 << 16)
    shares = process_plans_of(
        plan,
        SyncConfig(cuda_ipc=wire == "CUDA IPC"),
        Rendezvous(address=f"tcp://127.0.0.1:{store.port}", rank=0, size=2, timeout_s=120.0, secret=b"the run's"),
        hosts=("here", "here"),
        num_ranks=1,
        beside={1: 0},
        segments=Path(directory) / "segment",
    )
    assert set(shares[0].wires) == {wire}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        answer = pool.submit(_receive_on_device, shares[1])
        wires = RoutedSender(shares[0], platform().device())
        sender = BridgeSender(shares[0], wires)
        on_device = {name: value.to(platform().device()) for name, value in values.items()}
        for transfer in (1, 2):
            slices = [Slice(tensor=name, index=(), view=value, owned=True) for name, value in on_device.items()]
            sender.send(slices, transfer, with_checksums=False)
            for value in on_device.values():
                value.view(torch.uint8).bitwise_not_()
        received = answer.result(timeout=120.0)
        wires.close()
        return received


def exchange_beside_expandable_segments(
    context: RankContext, values: Mapping[str, torch.Tensor], directory: str
) -> tuple[list[dict[str, torch.Tensor]], set[bool], set[bool]]:
    """As `exchange_on_device`, where room for the messages is free in an expandable segment.

    And whether segments are expandable: those of the pool of shared memory, and the others.
    """
    platform().activate()
    torch.cuda.empty_cache()
    # Freed at once, but kept by the allocator.
    torch.empty(64 << 20, dtype=torch.uint8, device=platform().device())
    received = exchange_on_device(context, values, directory, "CUDA IPC")
    kinds: dict[bool, set[bool]] = {True: set(), False: set()}
    for segment in torch.cuda.memory_snapshot():
        kinds[tuple(segment["segment_pool_id"]) != (0, 0)].add(segment["is_expandable"])
    return received, kinds[True], kinds[False]


def _receive_on_device(share: ProcessPlan) -> list[dict[str, torch.Tensor]]:
    """Both transfers, on the host: in the process that has the other end."""
    device = platform().device()
    receiver = BridgeReceiver(share, RoutedReceiver(share, device), device)
    return [{name: tensor.cpu() for name, tensor in receiver.receive(transfer)} for transfer in (1, 2)]


def alone_and_together(
    context: RankContext, spec: EngineSpec, requests: Sequence[GenerationRequest]
) -> tuple[list[Completion], list[Completion]]:
    """Completions of requests one after the other, and of all at once."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    engine = VllmEngine(spec)
    try:
        return [engine.generate([request])[0] for request in requests], engine.generate(requests)
    finally:
        engine.close()


def logprobs_alone_and_together(
    context: RankContext, actor: ActorConfig, model: ModelConfig, rows: Sequence[Row]
) -> tuple[list[bytes], list[bytes]]:
    """The bits of the trainer's log-probs, with a micro-batch for each row, and with one for all."""
    worker = join_layout(context, actor.layout)
    role = RoleSpec(role=Role.ACTOR, model=model, settings=actor)
    worker.load(LoadRequest(roles=(role,), seed=0, batch_invariant=True))
    whole = list(range(len(rows)))
    results = [
        worker.forward(rows, plan, ForwardRequest(role=Role.ACTOR, step=1)) for plan in ([[i] for i in whole], [whole])
    ]
    first, second = ([each.quantities["logprobs"][i].tobytes() for i in whole] for each in results if each is not None)
    return first, second
