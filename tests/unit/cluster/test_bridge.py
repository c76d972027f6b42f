"""The sync by the bridge: who gets what, what is checked and counted. Ends are real, processes are threads."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from megarl.cluster import bridge
from megarl.cluster.bridge import BridgeSync
from megarl.cluster.location import Location
from megarl.cluster.processes import Process
from megarl.errors import WeightSyncError
from megarl.parallel.weights.bridge.boxes import Box
from megarl.parallel.weights.bridge.ends import BridgeReceiver, BridgeSender, holding_of
from megarl.parallel.weights.bridge.routes import RoutedReceiver, RoutedSender
from megarl.parallel.weights.bridge.wires import Share
from megarl.parallel.weights.collective import open_store
from megarl.parallel.weights.slices import Slice
from megarl.rollout.engine import Received
from megarl.safetensors_map import TensorSpec

SHAPE = (4, 3)
SPECS = {"a": TensorSpec(shape=SHAPE, dtype=torch.float32)}
VALUES = torch.arange(1.0, 13.0).view(SHAPE)
# Two workers per engine: the upper rows and the lower ones.
NEEDS = ({"a": ((0, 2), (0, 3))}, {"a": ((2, 4), (0, 3))})
MakeProcess: TypeAlias = Callable[[str, Any], Process]


class Rank:
    """Holds rows of the tensor."""

    def __init__(self, start: int, end: int) -> None:
        rows = slice(start, end)
        self.slices = [Slice(tensor="a", index=(rows,), view=VALUES[rows].clone(), owned=True)]

    def held_weights(self) -> dict[str, Box]:
        return holding_of(self.slices, {"a": SHAPE})

    def offer_channel(self, address: str) -> int:
        self.store = open_store(address)
        return self.store.port

    def open_bridge(self, share: Share) -> None:
        self.wire = RoutedSender(share)
        self.bridge = BridgeSender(share, self.wire)

    def send_over_bridge(self, transfer: int, *, with_checksums: bool) -> dict[int, dict[str, int]]:
        return self.bridge.send(self.slices, transfer, with_checksums=with_checksums)

    def close_bridge(self) -> None:
        self.wire.close()


class Engine:
    """Keeps what its two workers receive; the second may lose a bit of it."""

    def __init__(self, lost: float = 0.0) -> None:
        self.lost, self.received = lost, list[tuple[int, list[torch.Tensor]]]()

    def open_bridge(self, shares: Sequence[Share]) -> None:
        self.workers = [BridgeReceiver(share, RoutedReceiver(share), torch.device("cpu")) for share in shares]

    def receive_over_bridge(self, transfer: int, *, version: int, with_checksums: bool) -> list[Received]:
        with ThreadPoolExecutor(2) as pool:
            tensors = list(pool.map(lambda worker: dict(worker.receive(transfer, fill=math.nan))["a"], self.workers))
        tensors[1] -= self.lost
        self.received.append((version, tensors))
        return [
            Received(
                checksums={"a": worker.checksum("a", tensor)} if with_checksums else {}, wire_bytes=worker.wire_bytes
            )
            for worker, tensor in zip(self.workers, tensors, strict=True)
        ]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeProcess]:
    """Makes a process of an object: remote calls run in threads, and `wait_all` waits for these."""
    with ThreadPoolExecutor(8) as pool:

        class Actor:
            def __init__(self, target: Any) -> None:
                self.call = type("Call", (), {"remote": staticmethod(self.remote)})
                self.target = target

            def remote(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
                return pool.submit(getattr(self.target, method), *args, **kwargs)

        def wait_all(calls: Sequence[tuple[Process, Future[Any]]], **_: Any) -> list[Any]:
            return [future.result(timeout=30) for _, future in calls]

        monkeypatch.setattr(bridge, "wait_all", wait_all)
        here = Location(host="here", address="127.0.0.1", device_ids=())
        yield lambda name, target: Process(name=name, actor=Actor(target), location=here)


def open_sync(
    process: MakeProcess, ranks: Sequence[Rank], engines: Sequence[Engine], path: Path, *shares: Sequence[int]
) -> BridgeSync:
    return BridgeSync(
        [process(f"trainer rank {i}", rank) for i, rank in enumerate(ranks)],
        [process(f"engine {i}", engine) for i, engine in enumerate(engines)],
        SPECS,
        NEEDS,
        shares=shares,
        segments=path / "bridge",
        over_devices=False,
        timeout_s=30.0,
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


def test_verify_compares_every_worker(process: MakeProcess, tmp_path: Path) -> None:
    sync = open_sync(process, [Rank(0, 4)], [Engine(), Engine(lost=1e-3)], tmp_path)
    sync.push(1, verify=False)
    with pytest.raises(WeightSyncError, match=r"1 tensors differ between trainer and engine after a sync: \['a'\]"):
        sync.push(2, verify=True)
