"""Watch the memory, descriptors and threads of a run's processes, and warn once of what grows without end.

A slope is Theil and Sen's, the median of the slopes of all pairs, over the later half of what was measured: what fills
while a run warms up is left out. It counts as growth if every quarter of that half grows too, by enough to matter.
"""

import contextlib
import gc
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from megarl.host.streams import print_lines

MIB_PER_GIB = 1024
# Fewer values say nothing; no more are kept or compared, by leaving out every second one.
MIN_VALUES, MAX_VALUES = 64, 512
# A look at all slopes follows the last one after this share more steps.
LOOK_EVERY = 0.25
# Growth is not warned of if it fills what there is only later than this.
FAR_HOURS = 14 * 24.0
# How often descriptors, threads and processes that nobody named are counted, which takes milliseconds.
COUNT_EVERY_S = 30.0
NUM_KINDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource that is measured of each process, under the metric `prefix/PROCESS`.

    least: growth over the values looked at that matters. unit: of `scale` times the value, in words. room: returns how
    much more there may be of it in a process.
    """

    prefix: str
    words: str
    least: float
    unit: str
    scale: float
    room: Callable[[int], float]


def _free_descriptors(pid: int) -> float:
    return float(psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0] - psutil.Process(pid).num_fds())


RESOURCES = (
    Resource(
        prefix="memory/private_gib",
        words="memory grows",
        least=32 / MIB_PER_GIB,
        unit=" MiB",
        scale=MIB_PER_GIB,
        room=lambda _pid: psutil.virtual_memory().available / 2**30,
    ),
    Resource(
        prefix="process/descriptors", words="open descriptors grow", least=16, unit="", scale=1, room=_free_descriptors
    ),
    Resource(
        prefix="process/threads",
        words="threads grow",
        least=16,
        unit="",
        scale=1,
        room=lambda _pid: float(Path("/proc/sys/kernel/threads-max").read_text(encoding="ascii")),
    ),
)
MEASURED = tuple(f"{resource.prefix}/" for resource in RESOURCES)


def slope_of(steps: Sequence[float], values: Sequence[float]) -> float:
    """Return the median of the slopes of all pairs of values at ascending steps.

    >>> slope_of([0, 1, 2, 3], [1.0, 3.0, 500.0, 7.0])
    2.0
    """
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    a, b = np.triu_indices(len(x), 1)
    return float(np.median((y[b] - y[a]) / (x[b] - x[a])))


def growth_of(steps: Sequence[float], values: Sequence[float], least: float) -> float:
    """Return the slope of the later half of values if all of it grows, by `least` or more; otherwise 0.

    >>> growth_of(range(64), [0.5 * step for step in range(64)], least=8), growth_of(range(64), [1.0] * 64, least=8)
    (0.5, 0.0)
    """
    steps, values = steps[len(steps) // 2 :], values[len(values) // 2 :]
    if len(steps) < MIN_VALUES // 2:
        return 0.0
    bounds = [i * len(steps) // 4 for i in range(5)]
    quarters = [slope_of(steps[a:b], values[a:b]) for a, b in itertools.pairwise(bounds)]
    slope = slope_of(steps, values)
    return slope if min(quarters) > 0 and slope * (steps[-1] - steps[0]) >= least else 0.0


@dataclass(slots=True)
class Readings:
    """Values of a resource at ascending steps: all of them, or every second, fourth, … of a long run."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    stride: int = 1
    num_seen: int = 0

    def add(self, step: float, value: float) -> None:
        self.num_seen += 1
        if self.num_seen % self.stride:
            return
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) >= MAX_VALUES:
            self.stride *= 2
            del self.steps[::2], self.values[::2]


class GrowthWatch:
    """A watch over the processes of a run on this host, which measures them once per step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start_s = clock, clock()
        self._num_steps, self._next_look, self._next_count_s = 0, MIN_VALUES, -math.inf
        self._processes: dict[str, psutil.Process] = {}
        self._samples: dict[tuple[str, str], Readings] = {}
        self._warned: set[tuple[str, str]] = set()
        self._kinds: Counter[str] = Counter()

    def metrics(self, step: int, pids: Mapping[str, int]) -> dict[str, float]:
        """Measure the processes of these names, and the driver; every `COUNT_EVERY_S` descriptors and threads too, and
        the memory of other processes that the driver has started, together under each of their names.
        """
        self._num_steps += 1
        counts = self._clock() >= self._next_count_s
        found: dict[str, float] = {}
        for name, pid in {"driver": os.getpid(), **pids}.items():
            # A process that ends meanwhile is reported by the call that needs it.
            with contextlib.suppress(psutil.Error):
                if name not in self._processes or self._processes[name].pid != pid:
                    self._processes[name] = psutil.Process(pid)
                    for resource in RESOURCES:
                        self._samples.pop((resource.prefix, name), None)
                process, label = self._processes[name], name.replace(" ", "_")
                memory = process.memory_info()
                found[f"memory/rss_gib/{label}"] = memory.rss / 2**30
                found[f"memory/private_gib/{label}"] = (memory.rss - memory.shared) / 2**30
                if counts:
                    found[f"process/descriptors/{label}"] = float(process.num_fds())
                    found[f"process/threads/{label}"] = float(process.num_threads())
        if counts:
            self._next_count_s = self._clock() + COUNT_EVERY_S
            found |= _others({os.getpid(), *pids.values()})
        for name in self._processes:
            for resource in RESOURCES:
                if (value := found.get(f"{resource.prefix}/{name.replace(' ', '_')}")) is not None:
                    self._samples.setdefault((resource.prefix, name), Readings()).add(step, value)
        if self._num_steps >= self._next_look:
            self._look()
        return found

    def _look(self) -> None:
        """Warn of what grows, once of each process and resource."""
        self._next_look = math.ceil(self._num_steps * (1 + LOOK_EVERY))
        hours_per_step = (self._clock() - self._start_s) / 3600 / self._num_steps
        for resource in RESOURCES:
            for name, process in self._processes.items():
                samples = self._samples.get((resource.prefix, name), Readings())
                slope = growth_of(samples.steps, samples.values, resource.least)
                if slope <= 0 or (resource.prefix, name) in self._warned:
                    continue
                with contextlib.suppress(psutil.Error):
                    hours = resource.room(process.pid) / slope * hours_per_step
                    if hours < FAR_HOURS:
                        self._warned.add((resource.prefix, name))
                        kinds = self._kinds_since() if name == "driver" and resource is RESOURCES[0] else ""
                        size = f"{slope * resource.scale:.3g}{resource.unit}"
                        print_lines(
                            f"warning: {name}: {resource.words} by {size} per step since step "
                            f"{samples.steps[len(samples.steps) // 2]:g}; full in {hours:.3g} hours{kinds}"
                        )
        if not self._kinds:
            self._kinds = _kinds()

    def _kinds_since(self) -> str:
        """Name the types of which the driver has most objects more than at the first look."""
        if not self._kinds:
            return ""
        more = (_kinds() - self._kinds).most_common(NUM_KINDS)
        return "; more objects now: " + ", ".join(f"{count:,} {name}" for name, count in more) if more else ""


def _kinds() -> Counter[str]:
    """Count the objects of this process that are not frozen by type."""
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def _others(known: set[int]) -> dict[str, float]:
    """Measure the private memory of descendants of this process that are not known, added up by their names."""
    sums: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.pid not in known:
                memory = process.memory_info()
                sums[f"memory/private_gib/others/{process.name().replace(' ', '_')}"] += memory.rss - memory.shared
    return {name: size / 2**30 for name, size in sums.items()}


def growth_table(series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> list[tuple[str, ...]]:
    """Return rows of texts about processes by their metrics, steps and values of each: private memory, its growth, and
    last counts of descriptors and threads; nothing without any. The first row names the columns.
    """
    memory, *counts = (resource.prefix for resource in RESOURCES)
    rows: list[tuple[str, ...]] = []
    for name, (steps, values) in series.items():
        if name.startswith(f"{memory}/"):
            label, stride = name.removeprefix(f"{memory}/"), -(-len(steps) // MAX_VALUES)
            growth = growth_of(steps[::stride], values[::stride], RESOURCES[0].least) * MIB_PER_GIB
            last = (series.get(f"{each}/{label}") for each in counts)
            rows.append((label, f"{values[-1]:.2f}", f"{growth:.3g}", *(f"{x[1][-1]:g}" if x else "" for x in last)))
    names = ("process", "private GiB", "growth, MiB/step", "descriptors", "threads")
    return [names, *rows] if rows else []
