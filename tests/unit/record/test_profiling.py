"""The window of profiled steps, and a real trace of a worker."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megarl.parallel.worker import RankWorker
from megarl.record.performance import StepProfiler


class FakeWorkers:
    """Keeps what it was asked, with the steps in between."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start_profile(self) -> None:
        self.calls.append("start")

    def stop_profile(self, directory: Path) -> None:
        self.calls.append(f"stop {directory}")


@pytest.mark.parametrize(
    ("steps", "run", "expected"),
    [
        ((2, 3), range(1, 5), ["1", "start", "2", "3", "stop d", "4"]),
        ((2, 2), range(1, 4), ["1", "start", "2", "stop d", "3"]),
        ((2, 4), range(3, 6), ["start", "3", "4", "stop d", "5"]),  # resumed within the window
        ((2, 3), range(4, 6), ["4", "5"]),
        (None, range(1, 3), ["1", "2"]),
    ],
)
def test_window(steps: tuple[int, int] | None, run: range, expected: list[str]) -> None:
    workers = FakeWorkers()
    profiler = StepProfiler(workers, steps, Path("d"))
    for step in run:
        with profiler.around(step):
            workers.calls.append(str(step))
    assert workers.calls == expected


def test_a_worker_writes_what_it_did(tmp_path: Path) -> None:
    worker = RankWorker(3)
    worker.start_profile()
    torch.ones(4, 4) @ torch.ones(4, 4)
    worker.stop_profile(str(tmp_path / "profile"))
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank_3.json.gz").read_bytes()))
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
