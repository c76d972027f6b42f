"""`megarl trace`, by the Trace Event Format: complete events in microseconds, and metadata that names the threads."""

import json
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.record.metrics import RunPaths, Stage
from megarl.record.timeline import append_timeline, step_intervals, trace_events

START = 1700000000.0


def test_events_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path / "sums")
    paths.root.mkdir()
    stages = [
        Stage("gen", START + 0.5, START + 1.25),
        Stage("sync", START + 1.25, START + 2.0),
        Stage("step", START + 0.5, START + 2.5),
    ]
    engines = {"1": [(START + 1.0, START + 1.5)], "0": [(START, START + 1.0)]}
    append_timeline(paths.timeline, step_intervals(3, stages, engines))
    main(["trace", str(paths.root)])
    assert capsys.readouterr().out == f"wrote {paths.trace}; open it on ui.perfetto.dev\n"
    trace = json.loads(paths.trace.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert [(e["name"], e["args"]) for e in metadata if e["name"] == "process_name"] == [
        ("process_name", {"name": "sums"})
    ]
    named = {e["tid"]: e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in metadata if e["name"] == "thread_sort_index"}
    assert [named[tid] for tid in sorted(named, key=order.__getitem__)] == ["step", "trainer", "engine 0", "engine 1"]
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    # Since the first interval's start, which is that of engine 0.
    assert [(named[e["tid"]], e["name"], e["ts"], e["dur"]) for e in complete] == [
        ("trainer", "gen", 500_000, 750_000),
        ("trainer", "sync", 1_250_000, 750_000),
        ("step", "step", 500_000, 2_000_000),
        ("engine 1", "generate", 1_000_000, 500_000),
        ("engine 0", "generate", 0, 1_000_000),
    ]
    assert {e["pid"] for e in trace["traceEvents"]} == {1}
    assert all(e["args"] == {"step": 3} for e in complete)


def test_stages_that_touch_still_do_after_rounding() -> None:
    """Thirds of a microsecond from 0.3 on: rounded durations would make the first end after the second's start."""
    ends = [START + thirds / 3e6 for thirds in (0, 100, 201, 305)]
    stages = [Stage("gen", ends[i], ends[i + 1]) for i in range(3)]
    events = [event for event in trace_events(step_intervals(1, stages, {}), "run") if event["ph"] == "X"]
    assert [left["ts"] + left["dur"] for left in events[:-1]] == [right["ts"] for right in events[1:]]


def test_another_file_and_what_cannot_be_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path)
    cases = {
        "no timeline at": (),
        "holds no intervals yet": (),
        "cannot write": ("--out", str(tmp_path / "nowhere" / "trace.json")),
    }
    for message, options in cases.items():
        with pytest.raises(SystemExit):
            main(["trace", str(tmp_path), *options])
        assert message in capsys.readouterr().err
        paths.timeline.touch()
        if message == "holds no intervals yet":
            append_timeline(paths.timeline, step_intervals(1, [Stage("gen", 1.0, 2.0)], {}))
    main(["trace", str(tmp_path), "--out", str(tmp_path / "other.json")])
    assert len(json.loads((tmp_path / "other.json").read_text())["traceEvents"]) == 4
