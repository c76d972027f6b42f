"""Record when the trainer and each engine worked (RUN/timeline.jsonl), measure how long each side was idle, and write
all that in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.errors import DataError
from megarl.host.sharing import shared_as
from megarl.host.unicode import visible
from megarl.host.writing import replacing
from megarl.record.json_lines import append_lines, open_lines, read_lines
from megarl.record.metrics import Stage

# Lanes of one run: its steps, the stages of the trainer, and engines by name, such as "engine 0".
STEP_LANE, TRAINER_LANE, ENGINE_PREFIX = "step", "trainer", "engine "
# Stages in which the trainer waits for samples and rewards; in all others it works.
WAITING = frozenset({"gen", "reward", "settle"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A stretch of time in which one side of the run worked on one thing.

    lane: the side; name: what it worked on. start_s, end_s: Unix seconds, by the clock of the lane's host. step: the
    training step with which it was recorded; an engine's interval may have begun before it.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    step: int

    def __post_init__(self) -> None:
        if not -math.inf < self.start_s <= self.end_s < math.inf:
            raise DataError(
                f"interval {self.name} of {self.lane} at step {self.step}: got {self.start_s} to {self.end_s}, "
                "expected finite times in order; look at the clock of this host"
            )


def step_intervals(
    step: int, stages: Iterable[Stage], engines: Mapping[str, Sequence[tuple[float, float]]]
) -> list[Interval]:
    """Return the intervals of a step: of its stages, in the lane of the trainer, and of the engines.

    stages: as `Timers.stages` returns them; the one named "step", which contains others, has a lane of its own.
    engines: name, such as "0" → (start, end) of the times in which this engine had unfinished requests, in Unix
    seconds. An engine that is at work when it is asked ends an interval at that moment and begins the next one.

    >>> step_intervals(3, [Stage("gen", 1.0, 2.0)], {"0": [(0.5, 1.5)]})[1]
    Interval(lane='engine 0', name='generate', start_s=0.5, end_s=1.5, step=3)
    """
    lanes = {"step": STEP_LANE}
    phases = [(lanes.get(name, TRAINER_LANE), name, start_s, end_s) for name, start_s, end_s in stages]
    generations = [
        (f"{ENGINE_PREFIX}{engine}", "generate", *time) for engine, times in engines.items() for time in times
    ]
    return [
        # The clock of an engine's host may be set back while the engine works.
        Interval(lane=lane, name=name, start_s=start_s, end_s=max(start_s, end_s), step=step)
        for lane, name, start_s, end_s in phases + generations
    ]


def append_timeline(path: Path, intervals: Iterable[Interval]) -> None:
    """Append intervals to a timeline, one line of JSON each, all of them on disk when this returns."""
    with open_lines(path, rotates=True) as file:
        append_lines(file, map(asdict, intervals))


def read_timeline(path: Path) -> list[Interval]:
    """Read a timeline in the order written. An incomplete last line, left by a kill, is skipped; other bad lines raise
    DataError.
    """
    if not os.path.lexists(path):
        raise DataError(f"no timeline at {path}: expected the timeline.jsonl that `megarl train` writes in each step")
    expected = "an object of lane, name, start_s, end_s and step"
    found = read_lines(path, _parse, expected=expected, kind=Interval)
    # A timeline of a long run has few names.
    shown = {text: visible(text) for text in {each.lane for each in found} | {each.name for each in found}}
    if all(text == other for text, other in shown.items()):
        return found
    return [replace(each, lane=shown[each.lane], name=shown[each.name]) for each in found]


def _parse(raw: Any) -> Interval:
    return Interval(
        lane=str(raw["lane"]),
        name=str(raw["name"]),
        start_s=float(raw["start_s"]),
        end_s=float(raw["end_s"]),
        step=int(raw["step"]),
    )


def lanes_of(intervals: Iterable[Interval]) -> list[str]:
    """List the lanes that intervals lie in: steps, the trainer, then engines by number.

    >>> busy = step_intervals(1, [Stage("gen", 0.0, 1.0)], {"10": [(0.0, 1.0)], "9": [(0.0, 1.0)]})
    >>> lanes_of(busy)
    ['trainer', 'engine 9', 'engine 10']
    """
    first = (STEP_LANE, TRAINER_LANE)
    # The number with more digits is larger.
    return sorted(
        {interval.lane for interval in intervals},
        key=lambda lane: (first.index(lane) if lane in first else len(first), len(lane), lane),
    )


def covered_s(times: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """Return how many seconds of a window lie in at least one of the given times, each (start, end).

    >>> covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)], (1.0, 6.0))  # 1 to 3 and 5 to 6
    3.0
    """
    total, reached = 0.0, window[0]
    for start, end in sorted(times):
        begin, end = max(start, reached), min(end, window[1])
        if end > begin:
            total += end - begin
            reached = end
    return total


def idle_metrics(stages: Sequence[Stage], engines: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Return the shares of a step's wall time in which either side of the run was idle; nothing without a step.

    perf/trainer_idle_frac: without a stage of the trainer at work, that is, waiting for samples or rewards, or between
    stages. perf/engine_idle_frac: mean over engines of the share of the step in which the engine had nothing to do;
    left out without engines. Times outside of the step do not count. Arguments are those of `step_intervals`.

    >>> stages = [Stage("gen", 0.0, 6.0), Stage("update_actor", 6.0, 9.0), Stage("step", 0.0, 10.0)]
    >>> idle_metrics(stages, {"0": [(-5.0, 4.0)], "1": [(1.0, 7.0)]})
    {'perf/trainer_idle_frac': 0.7, 'perf/engine_idle_frac': 0.5}
    """
    window = next(((start, end) for name, start, end in stages if name == "step"), None)
    if window is None:
        return {}
    length = window[1] - window[0]
    work = [(start, end) for name, start, end in stages if name not in WAITING | {"step"}]
    busy = [covered_s(times, window) / length for times in engines.values()]
    idle = {"perf/trainer_idle_frac": 1 - covered_s(work, window) / length}
    return idle | ({"perf/engine_idle_frac": 1 - sum(busy) / len(busy)} if busy else {})


# All lanes are threads of one process.
_PROCESS = 1


def write_trace(timeline: Path, out: Path) -> None:
    """Write the trace of a timeline (RUN/timeline.jsonl) to a file, which is replaced if it exists."""
    intervals = read_timeline(timeline)
    if not intervals:
        raise DataError(f"{timeline} holds no intervals yet, expected at least one line; wait for the first step")
    run = timeline.resolve().parent.name
    if not out.parent.is_dir():
        raise DataError(
            f"cannot write {out}: there is no directory {out.parent}; make it, or choose another with --out"
        )
    with shared_as(timeline.parent), replacing(out) as file:
        file.write_text(
            json.dumps({"traceEvents": trace_events(intervals, run), "displayTimeUnit": "ms"}), encoding="utf-8"
        )


def trace_events(intervals: Sequence[Interval], run: str) -> list[dict[str, object]]:
    """Return a complete event (ph X) for each interval, after metadata events (ph M) that name the run and its lanes.

    Times ts and durations dur are whole microseconds since the first interval's start. Both ends of an interval are
    rounded, not its duration: so intervals that touch or lie within one another still do.

    >>> gen = Interval(lane="trainer", name="gen", start_s=1700000000.0, end_s=1700000000.5, step=1)
    >>> trace_events([gen], "sums")[-1]
    {'name': 'gen', 'ph': 'X', 'ts': 0, 'dur': 500000, 'pid': 1, 'tid': 1, 'args': {'step': 1}}
    """
    first_s = min(interval.start_s for interval in intervals)
    threads = {lane: number for number, lane in enumerate(lanes_of(intervals), start=1)}
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": run}}]
    for lane, tid in threads.items():
        thread = {"ph": "M", "pid": _PROCESS, "tid": tid}
        events.append({"name": "thread_name", **thread, "args": {"name": lane}})
        events.append({"name": "thread_sort_index", **thread, "args": {"sort_index": tid}})
    for interval in intervals:
        start, end = (round((time_s - first_s) * 1e6) for time_s in (interval.start_s, interval.end_s))
        events.append(
            {
                "name": interval.name,
                "ph": "X",
                "ts": start,
                "dur": end - start,
                "pid": _PROCESS,
                "tid": threads[interval.lane],
                "args": {"step": interval.step},
            }
        )
    return events
