"""The sync without files: who meets where, and what is checked. Channels are real, processes are threads."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.cluster import collective
from megarl.cluster.collective import CollectiveSync
from megarl.errors import WeightSyncError
from megarl.sync.wire.collective import Meeting, WeightChannel, open_store
from megarl.types.messages import StoreResult
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.slices import Slice, checksum, count_elements, slice_checksums
from tests.helpers.threaded_processes import MakeProcess, threaded_processes

SPECS = {"a": TensorSpec(shape=(4, 3), dtype=torch.float32)}
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


class Flipping:
    """A process group that changes one bit of what a member receives."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.group.allreduce(tensors).wait()
        tensors[0][-1] ^= 1 << 62
        return SimpleNamespace(wait=lambda: None)


class Engine:
    """Keeps what its two workers receive, the second perhaps with another bit."""

    def __init__(self, *, flips: bool = False) -> None:
        self.flips, self.received = flips, list[tuple[int, torch.Tensor]]()

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
        if self.flips:
            self.channels[1]._group = Flipping(self.channels[1]._group)  # type: ignore[assignment]

    def receive_weights(self, *, version: int, with_checksums: bool) -> list[dict[str, int]]:
        with ThreadPoolExecutor(ENGINE_TP) as pool:
            received = list(pool.map(lambda channel: dict(channel.receive())["a"], self.channels))
        self.received += [(version, tensor) for tensor in received]
        return [{"a": checksum(t, (), (4, 3))} if with_checksums else {} for t in received]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeProcess]:
    with threaded_processes(monkeypatch, collective) as make:
        yield make


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


def test_verify_finds_one_flipped_bit_of_one_worker(process: MakeProcess) -> None:
    sync = open_sync(process, [Rank(0, 4)], [Engine(), Engine(flips=True)])
    sync.push(1, verify=False)
    with pytest.raises(WeightSyncError, match=r"1 tensors differ between trainer and engine after a sync: \['a'\]"):
        sync.push(2, verify=True)
