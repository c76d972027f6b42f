"""Write a run's timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""

import json
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import DataError
from megarl.host.sharing import shared_as
from megarl.host.writing import replacing
from megarl.record.timeline import Interval, lanes_of, read_timeline

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
