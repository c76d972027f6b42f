"""The sync without files: who meets where, and what is checked. Channels are real, processes are threads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest
import torch

from megarl.cluster import collective
from megarl.cluster.collective import CollectiveSync
from megarl.cluster.location import Location
from megarl.cluster.processes import Process
from megarl.errors import WeightSyncError
from megarl.parallel.messages import StoreResult
from megarl.parallel.weights.collective import Meeting, WeightChannel, open_store
from megarl.parallel.weights.slices import Slice, checksum, count_elements, slice_checksums
from megarl.safetensors_map import TensorSpec

SPECS = {"a": TensorSpec(shape=(4, 3), dtype=torch.float32)}
MakeProcess: TypeAlias = Callable[[str, Any], Process]
VALUES = torch.arange(1.0, 13.0).view(4, 3)
ENGINE_TP = 2


class Rank:
    """Owns rows of the tensor, from `start` on."""

    def __init__(self, start: int, end: int) -> None:
        rows = slice(start, end)
        self.slices = [Slice(tensor="a", index=(rows,), view=VALUES[rows], owned=True)]

    def offer_channel(self, address: str) -> int:
        self.store = open_store(address)
        return self.store.port

    def open_channel(self, meeting: Meeting, specs: dict[str, TensorSpec]) -> StoreResult:
        self.channel = WeightChannel(meeting, specs, torch.device("cpu"))
        return StoreResult(num_elements=count_elements(self.slices), checksums={})

    def send_weights(self, *, with_checksums: bool) -> StoreResult:
        self.channel.send(self.slices)
        sums = slice_checksums(self.slices, {"a": (4, 3)}) if with_checksums else {}
        return StoreResult(num_elements=count_elements(self.slices), checksums=sums)


class Engine:
    """Keeps what its two workers receive, and may lose a bit of it."""

    def __init__(self, lost: float = 0.0) -> None:
        self.lost, self.received = lost, list[tuple[int, torch.Tensor]]()

    def open_channel(self, meeting: Meeting, specs: dict[str, TensorSpec]) -> None:
        def join(worker: int) -> WeightChannel:
            mine = Meeting(
                address=meeting.address,
                port=meeting.port,
                rank=meeting.rank + worker,
                size=meeting.size,
                timeout_s=meeting.timeout_s,
            )
            return WeightChannel(mine, specs, torch.device("cpu"))

        with ThreadPoolExecutor(ENGINE_TP) as pool:
            self.channels = list(pool.map(join, range(ENGINE_TP)))

    def receive_weights(self, *, version: int, with_checksums: bool) -> list[dict[str, int]]:
        with ThreadPoolExecutor(ENGINE_TP) as pool:
            received = list(pool.map(lambda channel: dict(channel.receive())["a"] - self.lost, self.channels))
        self.received += [(version, tensor) for tensor in received]
        return [{"a": checksum(t, (), (4, 3))} if with_checksums else {} for t in received]


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

        monkeypatch.setattr(collective, "wait_all", wait_all)
        here = Location(host="here", address="127.0.0.1", device_ids=())
        yield lambda name, target: Process(name=name, actor=Actor(target), location=here)


def open_sync(process: MakeProcess, ranks: Sequence[Rank], engines: Sequence[Engine]) -> CollectiveSync:
    return CollectiveSync(
        [process(f"trainer rank {i}", rank) for i, rank in enumerate(ranks)],
        [process(f"engine {i}", engine) for i, engine in enumerate(engines)],
        SPECS,
        engine_tp=ENGINE_TP,
        timeout_s=30.0,
    )


def test_all_workers_of_all_engines_get_what_the_ranks_have(process: MakeProcess) -> None:
    engines = [Engine(), Engine()]
    sync = open_sync(process, [Rank(0, 3), Rank(3, 4)], engines)
    sync.push(5, verify=True)
    sync.push(6, verify=False)
    for engine in engines:
        assert [version for version, _ in engine.received] == [5, 5, 6, 6]
        assert all(torch.equal(tensor, VALUES) for _, tensor in engine.received)
    sync.close()


def test_ranks_that_own_too_little_never_send(process: MakeProcess) -> None:
    engine = Engine()
    with pytest.raises(WeightSyncError, match=r"a \(9/12\)"):
        open_sync(process, [Rank(0, 2), Rank(3, 4)], [engine])
    assert engine.received == []


def test_verify_compares_every_worker(process: MakeProcess) -> None:
    sync = open_sync(process, [Rank(0, 4)], [Engine(), Engine(lost=1e-3)])
    sync.push(1, verify=False)
    with pytest.raises(WeightSyncError, match=r"1 tensors differ between trainer and engine after a sync: \['a'\]"):
        sync.push(2, verify=True)
