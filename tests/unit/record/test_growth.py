"""Growth of processes: slopes by hand, what counts as growth, the warning, its objects, and its cost per step."""

import itertools
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.host.streams import warnings
from megarl.record import growth
from megarl.record.growth import MAX_VALUES, GrowthWatch, Readings, growth_of, growth_table, slope_of

MIB = 2**20


@dataclass
class FakeProcess:
    """A process whose private memory at step n is that of `sizes(n)` MiB."""

    pid: int

    def memory_info(self) -> SimpleNamespace:
        size: float = NOW["sizes"](NOW["step"]) if self.pid == 7 else 100
        return SimpleNamespace(rss=(size + 50) * MIB, shared=50 * MIB)

    def num_fds(self) -> int:
        return 10

    def num_threads(self) -> int:
        return 3

    def rlimit(self, _limit: int) -> tuple[int, int]:
        return 1024, 1024

    def children(self, recursive: bool) -> list["FakeProcess"]:
        return []


NOW: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth.psutil, "Process", lambda pid=7: FakeProcess(pid))
    monkeypatch.setattr(growth.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * MIB))
    warnings.clear()


def told(sizes: Callable[[int], float], steps: int) -> list[str]:
    """The warnings of so many steps of 36 s each, with a process of these sizes."""
    NOW.update(sizes=sizes, step=0)
    watch = GrowthWatch(clock=lambda: 36.0 * NOW["step"])
    for step in range(1, steps + 1):
        NOW["step"] = step
        watch.metrics(step, {"engine 0": 7})
    return list(warnings)


def test_slopes_are_medians_of_those_of_pairs() -> None:
    """Slopes of the pairs of (0, 0), (1, 2), (3, 3): 2, 1 and 0.5."""
    assert slope_of([0, 1, 3], [0, 2, 3]) == 1


def test_only_what_grows_to_the_end_counts() -> None:
    steps = range(200)
    assert growth_of(steps, [float(step) for step in steps], least=50) == 1
    # 99 steps of 1 are too little.
    assert growth_of(steps, [float(step) for step in steps], least=100) == 0
    # What fills in the first half, and a curve that has flattened in the last quarter.
    assert growth_of(steps, [float(min(step, 100)) for step in steps], least=1) == 0
    assert growth_of(steps, [float(min(step, 170)) for step in steps], least=1) == 0
    noise = random.Random(0)
    assert growth_of(steps, [noise.gauss(0, 1) for _ in steps], least=0.1) == 0


def test_a_process_that_grows_is_warned_of_once() -> None:
    """2 MiB a step of 36 s fill 1,000 MiB in 500 steps, 5 hours; 64 steps are looked at first, from step 33 on."""
    (warning,) = told(lambda step: 500 + 2 * step, 400)
    assert warning == "engine 0: memory grows by 2 MiB per step since step 33; full in 5 hours"


def test_what_does_not_grow_or_would_fill_in_weeks_is_not_warned_of() -> None:
    assert told(lambda step: 500 + 20 * math.sin(step), 400) == []
    assert told(lambda step: min(500 + 2 * step, 550), 400) == []
    # 0.02 MiB a step: 500 hours.
    assert told(lambda step: 500 + 0.02 * step, 4000) == []


def test_the_driver_names_the_objects_of_which_it_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []

    class Leaked:
        def __init__(self) -> None:
            self.itself = self

    def sizes(step: int) -> float:
        kept.extend(Leaked() for _ in range(100))
        # Growth begins after the first look.
        return 500.0 + max(0, step - 64) * 4

    monkeypatch.setattr(os, "getpid", lambda: 7)
    driver, engine = told(sizes, 300)
    assert driver.startswith("driver: memory grows by 4 MiB per step")
    assert ".Leaked" in driver.partition("more objects now: ")[2]
    assert "objects" not in engine


def test_long_runs_keep_few_values() -> None:
    samples = Readings()
    for step in range(1, 100_001):
        samples.add(step, float(step))
    assert len(samples.steps) < MAX_VALUES
    assert samples.steps == samples.values
    assert samples.steps[-1] > 99_000
    gaps = {b - a for a, b in itertools.pairwise(samples.steps)}
    assert gaps == {samples.stride}


def test_the_table_has_a_row_per_process() -> None:
    steps = list(range(1, 129))
    series = {
        "memory/private_gib/engine_0": (steps, [1 + step / 1024 for step in steps]),
        "process/descriptors/engine_0": ([1], [40.0]),
        "critic/score/mean": (steps, [0.0] * 128),
    }
    assert growth_table(series)[1:] == [("engine_0", "1.12", "1", "40", "")]
    assert growth_table({}) == []
