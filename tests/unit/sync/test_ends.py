"""Tensors reach engine workers bit for bit over every transport; processes are threads."""

import errno
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

from megarl.config.generation import SyncConfig
from megarl.errors import WeightSyncError
from megarl.host.store import open_store
from megarl.sync.plan.build import Plan, build_plan
from megarl.sync.plan.engine_shards import engine_needs
from megarl.sync.transport import cuda_ipc, shared_memory
from megarl.sync.transport.casts import scale_of, sent_specs
from megarl.sync.transport.ends import BridgeReceiver, BridgeSender, holding_of
from megarl.sync.transport.process_plans import process_plans_of
from megarl.sync.transport.rendezvous import Rendezvous
from megarl.sync.transport.routed import RoutedReceiver, RoutedSender
from megarl.sync.transport.shared_memory import HostMemory
from megarl.weights.boxes import Boxes, box_of, slices_of
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.slices import Slice
from tests.helpers.boxes import covered, received_bytes
from tests.unit.weights.test_slices import fused_tensors, hf_tensors, make_spec, rank_slices

CPU = torch.device("cpu")
TP, DP, ENGINE_TP = 4, 2, 2
NUM_RANKS = TP * DP
# The ranks on whose devices the two workers are, each on its host.
BESIDE = {NUM_RANKS: 0, NUM_RANKS + 1: 5}
# Bits that arithmetic on floats would not keep: NaN with a payload, negative zero, a subnormal, infinity.
ODD = torch.tensor([0x7FC12345, -0x80000000, 1, 0x7F800000, -1, 7], dtype=torch.int32).view(torch.float32)
HERE = ["here"] * (NUM_RANKS + ENGINE_TP)
# Ranks 0 to 3 and the first worker on one host, the others on another.
TWO_HOSTS = ["near" if i < TP or i == NUM_RANKS else "far" for i in range(NUM_RANKS + ENGINE_TP)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a run reaches its workers, and the transports that carry this."""

    hosts: Sequence[str] = field(default_factory=lambda: TWO_HOSTS)
    settings: SyncConfig = field(default_factory=lambda: SyncConfig(cuda_ipc=False))
    beside: Mapping[int, int] = field(default_factory=dict)
    transports: frozenset[str]


OVER_DEVICES = SyncConfig(cuda_ipc=False, host_group="device")
# Over gloo here also what would go over NCCL on GPUs.
ROUTES = {
    "one host": Route(hosts=HERE, beside=BESIDE, transports=frozenset({"shared memory"})),
    "two hosts": Route(beside=BESIDE, transports=frozenset({"shared memory", "gloo"})),
    "one host, over devices": Route(hosts=HERE, settings=OVER_DEVICES, transports=frozenset({"shared memory", "NCCL"})),
    "over devices": Route(settings=OVER_DEVICES, transports=frozenset({"shared memory", "NCCL"})),
    "passed on": Route(
        settings=OVER_DEVICES, beside=BESIDE, transports=frozenset({"shared memory", "NCCL, then shared memory"})
    ),
}
transports = pytest.mark.parametrize("transport", ROUTES)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(call) for call in calls]]


def make_slices(*, fused: bool = False) -> list[list[Slice]]:
    """Every rank's; one row of one tensor has odd bits in all replicas."""
    ranks = rank_slices(TP, DP, tied=False, fused=fused)
    for part in (part for rank in ranks for part in rank if part.tensor == "model.norm.weight"):
        part.view.copy_(ODD)
    return ranks


def full_tensors() -> dict[str, torch.Tensor]:
    return {**hf_tensors(tied=False), "model.norm.weight": ODD}


def make_plan(
    ranks: Sequence[Sequence[Slice]], bucket_bytes: int, dtype: str | None = None, *, fused: bool = False
) -> Plan:
    spec = make_spec(tied=False, fused=fused)
    shapes = spec.expected_tensors()
    needs = dict(enumerate(engine_needs(spec, ENGINE_TP), start=NUM_RANKS))
    return build_plan(
        sent_specs(spec, {name: TensorSpec(shape=s, dtype=torch.float32) for name, s in shapes.items()}, dtype),
        {i: holding_of(slices, shapes) for i, slices in enumerate(ranks)},
        needs,
        neighbours={worker: [rank] for worker, rank in BESIDE.items()},
        bucket_bytes=bucket_bytes,
    )


def open_ends(
    plan: Plan, transport: str, path: Path, *, timeout_s: float = 30.0, **settings: Any
) -> tuple[list[Any], list[Any]]:
    store, route = open_store("127.0.0.1"), ROUTES[transport]
    rendezvous = Rendezvous(
        address=f"tcp://127.0.0.1:{store.port}", rank=0, size=1, timeout_s=timeout_s, secret=b"the run's"
    )
    shares = process_plans_of(
        plan,
        replace(route.settings, **settings),
        rendezvous,
        hosts=route.hosts,
        num_ranks=NUM_RANKS,
        beside=route.beside,
        segments=path / "segment",
    )
    if not settings:
        assert {name for process_plan in shares for name in process_plan.transports} == route.transports

    def sender(i: int) -> BridgeSender:
        return BridgeSender(shares[i], RoutedSender(shares[i], CPU))

    def receiver(i: int) -> BridgeReceiver:
        return BridgeReceiver(shares[i], RoutedReceiver(shares[i], CPU), CPU)

    openings: list[Callable[[], Any]] = [lambda i=i: sender(i) for i in range(NUM_RANKS)]  # type: ignore[misc]
    openings += [lambda i=i: receiver(NUM_RANKS + i) for i in range(ENGINE_TP)]  # type: ignore[misc]
    opened = at_once(openings)
    # The store lives as long as somebody holds it.
    opened[0].store = store
    return opened[:NUM_RANKS], opened[NUM_RANKS:]


def run(
    senders: Sequence[BridgeSender],
    receivers: Sequence[BridgeReceiver],
    ranks: Sequence[Sequence[Slice]],
    turn: int,
    **options: Any,
) -> tuple[list[dict[int, dict[str, int]]], list[list[tuple[str, torch.Tensor]]]]:
    calls: list[Callable[[], Any]] = [
        lambda s=s, slices=slices: s.send(slices, turn, with_checksums=True, **options)  # type: ignore[misc]
        for s, slices in zip(senders, ranks, strict=True)
    ]
    calls += [lambda r=r: list(r.receive(turn, fill=math.nan)) for r in receivers]  # type: ignore[misc]
    results = at_once(calls)
    return results[: len(senders)], results[len(senders) :]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


@pytest.mark.parametrize(("transport", "bucket_bytes"), [*((route, 100) for route in ROUTES), ("two hosts", 1 << 20)])
def test_workers_get_what_they_need_and_nothing_else(transport: str, bucket_bytes: int, tmp_path: Path) -> None:
    ranks, expected = make_slices(), full_tensors()
    plan = make_plan(ranks, bucket_bytes)
    senders, receivers = open_ends(plan, transport, tmp_path)
    for turn in (1, 2):
        for part in (part for rank in ranks for part in rank if part.tensor == "model.layers.1.mlp.up_proj.weight"):
            part.view.add_(1000.0)
        expected["model.layers.1.mlp.up_proj.weight"] += 1000.0
        _, received = run(senders, receivers, ranks, turn)
        for i, tensors in enumerate(received):
            needs = plan.needs[NUM_RANKS + i]
            assert {name for name, _ in tensors} == set(expected)
            assert len(tensors) == len(expected)
            for name, tensor in tensors:
                assert_only_needed(tensor, expected[name], needs[name])
            assert receivers[i].wire_bytes == received_bytes(plan, NUM_RANKS + i)


def assert_only_needed(tensor: torch.Tensor, expected: torch.Tensor, boxes: Boxes) -> None:
    """The boxes are there, and the rest is NaN, as it was filled."""
    mine = torch.from_numpy(covered(tensor.shape, boxes))
    assert bits(tensor[mine]) == bits(expected[mine])
    assert tensor[~mine].isnan().all()


@pytest.mark.parametrize("dtype", [None, "float8_e4m3"])
def test_sections_arrive_and_their_checksums_agree(dtype: str | None, tmp_path: Path) -> None:
    """Ranks and workers have several boxes of a tensor; messages take a few rows of it."""
    ranks, expected = make_slices(fused=True), fused_tensors(full_tensors())
    plan = make_plan(ranks, 100, dtype, fused=True)
    assert len(plan.needs[NUM_RANKS]["model.layers.0.self_attn.qkv_proj.weight"]) == 3
    senders, receivers = open_ends(plan, "two hosts", tmp_path, delta=False)
    largest = [sender.largest(slices) for sender, slices in zip(senders, ranks, strict=True)]
    scaled = [name for name, spec in plan.specs.items() if spec.dtype == torch.float8_e4m3fn]
    assert bool(scaled) == (dtype is not None)
    scales = {name: scale_of(max(rank[name] for rank in largest)) for name in scaled}
    sent, received = run(senders, receivers, ranks, 1, scales=scales)
    for i, (receiver, tensors) in enumerate(zip(receivers, received, strict=True)):
        needs, sums = plan.needs[NUM_RANKS + i], merged([each.get(NUM_RANKS + i, {}) for each in sent])
        assert {name for name, _ in tensors} == set(expected)
        for name, tensor in tensors:
            if name in sums:
                assert receiver.checksum(name, tensor) == sums[name]
            exact = expected[name]
            if name in scaled:
                exact = (exact / scales[name]).to(torch.float8_e4m3fn).float() * scales[name]
            restored = receiver.restore(name, tensor, scales.get(name), fill=math.nan)
            assert_only_needed(restored, exact, needs[name])


@pytest.mark.parametrize("transport", ["one host", "passed on"])
def test_checksums_of_both_sides_agree_and_find_a_flipped_bit(transport: str, tmp_path: Path) -> None:
    ranks = make_slices()
    plan = make_plan(ranks, 300)
    senders, receivers = open_ends(plan, transport, tmp_path)
    sent, received = run(senders, receivers, ranks, 1)
    for i, (receiver, tensors) in enumerate(zip(receivers, received, strict=True)):
        expected = merged([sums.get(NUM_RANKS + i, {}) for sums in sent])
        needs = plan.needs[NUM_RANKS + i]
        # The second worker has no word of a vocabulary of ten.
        assert expected.keys() == {name for name, boxes in needs.items() if boxes}
        tensors = [(name, tensor) for name, tensor in tensors if name in expected]
        assert {name: receiver.checksum(name, tensor) for name, tensor in tensors} == expected
        name, tensor = next(each for each in tensors if each[1].ndim == 2)
        row = tensor[slices_of(needs[name][0])][0].view(torch.int32)
        row[-1] ^= 1
        assert receiver.checksum(name, tensor) != expected[name]


@pytest.mark.parametrize("transport", ["one host", "two hosts"])
def test_differences_give_the_same_bits_and_send_fewer_bytes(transport: str, tmp_path: Path) -> None:
    """Also after a full transfer in between, after one that changed nothing, and after one that failed."""
    ranks, expected = make_slices(), full_tensors()
    plan = make_plan(ranks, 20_000)
    senders, receivers = open_ends(plan, transport, tmp_path, delta=True)
    changes = {2: [3], 3: [], 4: [0, 5], 5: [1]}
    for turn in range(1, 6):
        for name, row in ((name, row) for name in expected for row in changes.get(turn, []) if expected[name].ndim > 1):
            set_row(ranks, expected, name, row, -float(turn))
        sent, received = run(senders, receivers, ranks, turn, full=turn == 4)
        for i, (receiver, tensors) in enumerate(zip(receivers, received, strict=True)):
            needs, whole = plan.needs[NUM_RANKS + i], received_bytes(plan, NUM_RANKS + i)
            for name, tensor in tensors:
                mine = torch.from_numpy(covered(tensor.shape, needs[name]))
                assert bits(tensor[mine]) == bits(expected[name][mine])
            assert receiver.wire_bytes == whole if turn in (1, 4) else 0 < receiver.wire_bytes < whole / 2
            sums = merged([each.get(NUM_RANKS + i, {}) for each in sent])
            assert {n: receiver.checksum(n, t) for n, t in tensors if n in sums} == sums


def set_row(
    ranks: Sequence[Sequence[Slice]], tensors: Mapping[str, torch.Tensor], name: str, row: int, value: float
) -> None:
    """Of a full tensor, and of all slices of it."""
    tensors[name][row] = value
    for part in (part for rank in ranks for part in rank if part.tensor == name):
        start, end = box_of(part.index, tensors[name].shape)[0]
        if start <= row < end:
            per_group = (end - start) // (len(part.view) if part.view.ndim > 2 else 1)
            view = part.view[(row - start) // per_group] if part.view.ndim > 2 else part.view
            view.reshape(per_group, -1)[(row - start) % per_group] = value


@pytest.mark.parametrize(("dtype", "delta"), [("bfloat16", False), ("float8_e4m3", True)])
def test_casts_are_those_of_whole_tensors(dtype: str, delta: bool, tmp_path: Path) -> None:
    """Whatever the slices, and checksums are of what travelled."""
    ranks, expected = make_slices(), full_tensors()
    plan = make_plan(ranks, 300, dtype)
    senders, receivers = open_ends(plan, "two hosts", tmp_path, delta=delta)
    largest = [sender.largest(slices) for sender, slices in zip(senders, ranks, strict=True)]
    scaled = {name for name, spec in plan.specs.items() if spec.dtype == torch.float8_e4m3fn}
    scales = {name: scale_of(max(rank[name] for rank in largest)) for name in scaled}
    assert scales == {name: scale_of(float(expected[name].abs().max())) for name in scaled}
    for turn in (1, 2):
        sent, received = run(senders, receivers, ranks, turn, scales=scales)
        for i, (receiver, tensors) in enumerate(zip(receivers, received, strict=True)):
            needs = plan.needs[NUM_RANKS + i]
            sums = merged([each.get(NUM_RANKS + i, {}) for each in sent])
            for name, tensor in tensors:
                mine = torch.from_numpy(covered(tensor.shape, needs[name]))
                if name in sums:
                    assert receiver.checksum(name, tensor) == sums[name]
                restored = receiver.restore(name, tensor, scales.get(name), fill=math.nan)
                exact = expected[name][mine]
                if name in scaled:
                    exact = (exact / scales[name]).to(torch.float8_e4m3fn).float() * scales[name]
                else:
                    exact = exact.to(plan.specs[name].dtype)
                assert torch.equal(restored[mine].nan_to_num(7.0), exact.nan_to_num(7.0))
                assert int(restored.isnan().sum()) == restored.numel() - exact.numel() + int(exact.isnan().sum())


def merged(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = {name for part in parts for name in part}
    return {name: sum(part.get(name, 0) for part in parts) % (1 << 64) for name in names}


@pytest.mark.parametrize("host_group", ["gloo", "device"])
def test_neighbours_share_device_memory_and_others_the_hosts(
    host_group: Literal["gloo", "device"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is memory of this process: tests/gpu has a real one. With a group of devices, ranks pass on what
    others of the host send, so that nothing is in the host's memory.
    """

    class Device:
        segments: ClassVar[dict[Path, torch.Tensor]] = {}
        num_synchronized: ClassVar[list[int]] = []

        def __init__(self, store: Any, device: torch.device, timeout_s: float) -> None:
            assert device == CPU

        def create(self, path: Path, num_bytes: int) -> torch.Tensor:
            self.segments[path] = torch.empty(num_bytes, dtype=torch.uint8)
            return self.segments[path]

        def open(self, path: Path, num_bytes: int) -> torch.Tensor:
            return self.segments[path]

        def copying(self) -> AbstractContextManager[None]:
            return nullcontext()

        def synchronize(self) -> None:
            self.num_synchronized.append(1)

    monkeypatch.setattr(cuda_ipc, "DeviceSegments", Device)
    ranks, expected = make_slices(), full_tensors()
    plan = make_plan(ranks, 300)
    senders, receivers = open_ends(plan, "one host", tmp_path, cuda_ipc=True, host_group=host_group)
    _, received = run(senders, receivers, ranks, 1)
    for i, tensors in enumerate(received):
        for name, tensor in tensors:
            mine = torch.from_numpy(covered(tensor.shape, plan.needs[NUM_RANKS + i][name]))
            assert bits(tensor[mine]) == bits(expected[name][mine])
    local = [message for message in plan.messages if message.local]
    near = {(message.receiver, message.bucket) for message in plan.messages if not message.local}
    passed = near if host_group == "device" else set()
    pairs = {f"segment-{message.source}-{message.receiver}" for message in local}
    pairs |= {f"segment-relayed-{BESIDE[receiver]}-{receiver}" for receiver, _ in passed}
    assert {path.name.rpartition("-")[0] for path in Device.segments} == pairs
    files = {path.name.rpartition("-")[0] for path in tmp_path.iterdir()}
    assert all("flags" in name for name in files) == (host_group == "device")
    assert not files & pairs
    # By either end of every message, or of all that is passed on in a bucket, before it tells the other one.
    assert len(Device.num_synchronized) == 2 * (len(local) + len(passed))


def test_too_little_shared_memory_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"needs 2\.00 GiB in .* for segment: No space left on device"):
        HostMemory().create(tmp_path / "segment", 2 << 30)
    assert not list(tmp_path.iterdir())


def test_a_worker_that_is_gone_is_an_error_and_the_next_transfer_works(tmp_path: Path) -> None:
    """Ranks do not wait for ever for one that takes nothing."""
    ranks = make_slices()
    plan = make_plan(ranks, 200)
    senders, receivers = open_ends(plan, "one host", tmp_path, timeout_s=6.0)
    with pytest.raises(WeightSyncError, match=r"rank \d to engine worker \d+ was not taken within 6 s"):
        at_once([lambda i=i: senders[i].send(ranks[i], 1, with_checksums=False) for i in range(NUM_RANKS)])  # type: ignore[misc]
    _, received = run(senders, receivers, ranks, 2)
    needs = plan.needs[NUM_RANKS]
    for name, tensor in received[0]:
        mine = torch.from_numpy(covered(tensor.shape, needs[name]))
        assert bits(tensor[mine]) == bits(full_tensors()[name][mine])
