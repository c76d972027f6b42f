"""The sync by the bridge: who gets what, what is checked and counted. Ends are real, processes are threads."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cluster import bridge
from megarl.cluster.bridge import BridgeSync
from megarl.config.generation import SyncConfig
from megarl.errors import NonFiniteError, WeightSyncError
from megarl.host.store import offer_store
from megarl.rollout.engine import Received
from megarl.sync.plan.build import WeightMessage
from megarl.sync.transport.ends import BridgeReceiver, BridgeSender, holding_of
from megarl.sync.transport.rendezvous import give_up
from megarl.sync.transport.routed import RoutedReceiver, RoutedSender
from megarl.sync.transport.shared_memory import SharedMemoryReceiver
from megarl.sync.transport.transports import Arrival, ProcessPlan
from megarl.weights.boxes import Boxes
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.slices import Slice
from tests.helpers.threaded_processes import MakeProcess, threaded_processes

CPU = torch.device("cpu")
SHAPE = (4, 3)
SPECS = {"a": TensorSpec(shape=SHAPE, dtype=torch.float32)}
VALUES = torch.arange(1.0, 13.0).view(SHAPE)
# Two workers per engine: the upper rows and the lower ones.
NEEDS = ({"a": (((0, 2), (0, 3)),)}, {"a": (((2, 4), (0, 3)),)})


class Rank:
    """Holds rows of the tensor."""

    def __init__(self, start: int, end: int) -> None:
        rows = slice(start, end)
        self.slices = [Slice(tensor="a", index=(rows,), view=VALUES[rows].clone(), owned=True)]

    def held_weights(self) -> dict[str, Boxes]:
        return holding_of(self.slices, {"a": SHAPE})

    def offer_sync_rendezvous(self, host: str) -> str:
        self.store, address = offer_store(host)
        return address

    def open_bridge(self, process_plan: ProcessPlan) -> None:
        self.rendezvous = process_plan.rendezvous
        self.transport = RoutedSender(process_plan, CPU)
        self.bridge = BridgeSender(process_plan, self.transport)

    def largest_weights(self) -> dict[str, float]:
        return self.bridge.largest(self.slices)

    def send_over_bridge(self, transfer: int, **options: Any) -> dict[int, dict[str, int]]:
        return self.bridge.send(self.slices, transfer, **options)

    def close_bridge(self) -> None:
        self.transport.close()


class Flipping(SharedMemoryReceiver):
    """Changes a bit of every message, behind the length with which differences begin."""

    def receive(self, message: WeightMessage) -> Arrival:
        arrival = super().receive(message)
        data = arrival.data.clone()
        data[8] ^= 1
        return arrival._replace(data=data)


class Engine:
    """Keeps what its two workers receive. flips: whether bits change on the way to the second."""

    def __init__(self, *, flips: bool = False) -> None:
        self.flips, self.received = flips, list[tuple[int, list[torch.Tensor]]]()

    def open_bridge(self, shares: Sequence[ProcessPlan]) -> None:
        transports = [RoutedReceiver(process_plan, CPU) for process_plan in shares]
        for end in transports[1]._ends if self.flips else ():
            getattr(end, "_transport", end).__class__ = Flipping
        self.workers = [
            BridgeReceiver(process_plan, transport, CPU)
            for process_plan, transport in zip(shares, transports, strict=True)
        ]

    def receive_over_bridge(
        self, transfer: int, *, version: int, with_checksums: bool, scales: Mapping[str, float]
    ) -> list[Received]:
        with ThreadPoolExecutor(2) as pool:
            tensors = list(pool.map(lambda worker: dict(worker.receive(transfer, fill=math.nan))["a"], self.workers))
        restored = [
            w.restore("a", t, scales.get("a"), fill=math.nan) for w, t in zip(self.workers, tensors, strict=True)
        ]
        self.received.append((version, restored))
        return [
            Received(
                checksums={"a": worker.checksum("a", tensor)} if with_checksums else {}, wire_bytes=worker.wire_bytes
            )
            for worker, tensor in zip(self.workers, tensors, strict=True)
        ]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeProcess]:
    with threaded_processes(monkeypatch, bridge) as make:
        yield make


def open_sync(
    process: MakeProcess,
    ranks: Sequence[Rank],
    engines: Sequence[Engine],
    path: Path,
    *shares: Sequence[int],
    specs: Mapping[str, TensorSpec] = SPECS,
    delta_full_every: int | None = None,
    timeout_s: float = 30.0,
) -> BridgeSync:
    return BridgeSync(
        [process(f"trainer rank {i}", rank) for i, rank in enumerate(ranks)],
        [process(f"engine {i}", engine) for i, engine in enumerate(engines)],
        specs,
        NEEDS,
        SyncConfig(cuda_ipc=False, delta=delta_full_every is not None, delta_full_every=delta_full_every or 1),
        shares=shares,
        segments=path / "bridge",
        timeout_s=timeout_s,
    )


def test_every_worker_gets_its_rows_and_only_lacking_bytes_count(process: MakeProcess, tmp_path: Path) -> None:
    """The first engine sits on both ranks, the second on devices of its own.

    Rank 0 holds three rows: all that its worker needs. The other worker lacks row 2, of 12 bytes.
    """
    ranks, engines = [Rank(0, 3), Rank(3, 4)], [Engine(), Engine()]
    sync = open_sync(process, ranks, engines, tmp_path, (0, 1), ())
    assert sync.push(5, verify=True) == {"sync/wire_bytes": 0 + 12 + 24 + 24}
    for rank in ranks:
        rank.slices[0].view.mul_(2.0)
    assert sync.push(6, verify=False) == {"sync/wire_bytes": 60}
    for engine in engines:
        assert [version for version, _ in engine.received] == [5, 6]
        for factor, (_, (upper, lower)) in zip((1.0, 2.0), engine.received, strict=True):
            assert torch.equal(upper[:2], factor * VALUES[:2])
            assert torch.equal(lower[2:], factor * VALUES[2:])
            assert upper[2:].isnan().all()
            assert lower[:2].isnan().all()
    assert list(tmp_path.iterdir())
    sync.close()
    assert not list(tmp_path.iterdir())


def test_rows_that_no_rank_holds_are_an_error_before_anything_is_sent(process: MakeProcess, tmp_path: Path) -> None:
    engine = Engine()
    with pytest.raises(WeightSyncError, match=r"no rank holds a\(\(2, 3\), \(0, 3\)\), which engine worker 3 needs"):
        open_sync(process, [Rank(0, 2), Rank(3, 4)], [engine], tmp_path)
    assert engine.received == []


def test_verify_finds_one_flipped_bit_of_one_worker(process: MakeProcess, tmp_path: Path) -> None:
    sync = open_sync(process, [Rank(0, 4)], [Engine(), Engine(flips=True)], tmp_path)
    sync.push(1, verify=False)
    with pytest.raises(WeightSyncError, match=r"1 tensors differ between trainer and engine after a sync: \['a'\]"):
        sync.push(2, verify=True)


def test_differences_find_a_flipped_bit_unasked_and_the_next_sync_is_full(process: MakeProcess, tmp_path: Path) -> None:
    rank, engine = Rank(0, 4), Engine(flips=True)
    sync = open_sync(process, [rank], [engine], tmp_path, delta_full_every=10, timeout_s=5.0)
    assert sync.push(1, verify=False) == {"sync/wire_bytes": 48}
    with pytest.raises(WeightSyncError, match="arrived with other bits than were sent"):
        sync.push(2, verify=False)
    assert sync.push(3, verify=False) == {"sync/wire_bytes": 48}


def test_differences_are_exact_and_everything_is_sent_each_third_time(process: MakeProcess, tmp_path: Path) -> None:
    """A difference of one of six floats: checksums of 8 bytes, a count of 4, a place of 2 and the value of 4."""
    rank, engine = Rank(0, 4), Engine()
    sync = open_sync(process, [rank], [engine], tmp_path, delta_full_every=3)
    expected, sizes = VALUES.clone(), []
    for version in range(7):
        sizes.append(sync.push(version, verify=True)["sync/wire_bytes"])
        for received, (first, end) in zip(engine.received[-1][1], ((0, 2), (2, 4)), strict=True):
            assert torch.equal(received[first:end], expected[first:end])
        for row in (0, 3):
            rank.slices[0].view[row, version % 3] = expected[row, version % 3] = -1.0 - version
    assert sizes == [48, 36, 36, 48, 36, 36, 48]


@pytest.mark.parametrize("delta_full_every", [None, 10], ids=["plain", "differences"])
def test_who_waits_in_a_transfer_that_is_given_up_fails_and_the_next_one_is_good(
    delta_full_every: int | None, process: MakeProcess, tmp_path: Path
) -> None:
    """A rank whose engine takes nothing, then an engine whose rank sends nothing."""
    rank, engine = Rank(0, 4), Engine()
    sync = open_sync(process, [rank], [engine], tmp_path, delta_full_every=delta_full_every, timeout_s=300.0)
    options = {"with_checksums": False, "scales": {}}
    with ThreadPoolExecutor(1) as pool:
        for transfer, call in (
            (101, lambda: rank.send_over_bridge(101, full=True, **options)),
            (102, lambda: engine.receive_over_bridge(102, version=1, **options)),
        ):
            waiting = pool.submit(call)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1.0)
            give_up(rank.rendezvous, transfer)
            with pytest.raises(WeightSyncError, match="a process that took part in this sync has died"):
                waiting.result(timeout=30.0)
    assert sync.push(1, verify=True) == {"sync/wire_bytes": 48}


def test_a_cast_counts_its_own_bytes_and_scales(process: MakeProcess, tmp_path: Path) -> None:
    """VALUES go up to 12 = 384 · 2⁻⁵, so that integers up to 8 and even ones beyond have a code of their own."""
    specs = {"a": TensorSpec(shape=SHAPE, dtype=torch.float8_e4m3fn)}
    ranks, engine = [Rank(0, 3), Rank(3, 4)], Engine()
    sync = open_sync(process, ranks, [engine], tmp_path, specs=specs)
    # Two workers with six elements and a scale each.
    assert sync.push(1, verify=True) == {"sync/wire_bytes": 2 * (6 + 4)}
    upper, lower = engine.received[0][1]
    assert torch.equal(upper[:2], VALUES[:2])
    assert torch.equal(lower[2:], VALUES[2:])


def test_weights_without_a_scale_are_an_error_before_anything_is_sent(process: MakeProcess, tmp_path: Path) -> None:
    specs = {"a": TensorSpec(shape=SHAPE, dtype=torch.float8_e4m3fn)}
    rank, engine = Rank(0, 4), Engine()
    sync = open_sync(process, [rank], [engine], tmp_path, specs=specs)
    rank.slices[0].view[1, 1] = math.inf
    with pytest.raises(NonFiniteError, match="a has weights that are not finite"):
        sync.push(1, verify=False)
    assert engine.received == []
