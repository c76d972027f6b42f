"""The timeline in a report: which steps it shows, what it cuts off, and when it is there at all."""

import re
from pathlib import Path

from megarl.record.metrics import JsonlSink, MetricsLogger, RunPaths, Stage
from megarl.record.timeline import Interval, append_timeline, step_intervals
from megarl.report import write_report
from megarl.report.figures import timeline_windows


def step_of_10_s(step: int, *, start: float, num_engines: int = 1) -> list[Interval]:
    """4 s of waiting, 6 s of update; each engine works from 1 s before the step to 3 s after its start."""
    stages = [
        Stage("gen", start, start + 4),
        Stage("update_actor", start + 4, start + 10),
        Stage("step", start, start + 10),
    ]
    return step_intervals(step, stages, {str(engine): [(start - 1, start + 3)] for engine in range(num_engines)})


def steps_shown(starts: list[float]) -> list[list[int]]:
    timeline = [i for number, start in enumerate(starts, start=1) for i in step_of_10_s(number, start=start)]
    return [[step.step for step in window.steps] for window in timeline_windows(timeline)]


def test_steps_in_the_middle_and_the_last_ones_or_all_of_a_short_run() -> None:
    assert steps_shown([]) == []
    assert steps_shown([0.0]) == [[1]]
    assert steps_shown([10.0 * i for i in range(6)]) == [[1, 2, 3, 4, 5, 6]]
    assert steps_shown([10.0 * i for i in range(7)]) == [[3, 4, 5], [5, 6, 7]]
    assert steps_shown([10.0 * i for i in range(40)]) == [[19, 20, 21], [38, 39, 40]]


def test_a_pause_of_the_run_is_not_drawn() -> None:
    """Between the steps 4 and 5 an hour passes; between 6 and 7 a validation of 12 s, which is shown."""
    assert steps_shown([0.0, 10.0, 20.0, 30.0, 3640.0, 3650.0, 3672.0]) == [[5], [5, 6, 7]]


def test_what_crosses_a_border_of_the_steps_shown_is_cut() -> None:
    timeline = step_of_10_s(1, start=100.0) + step_of_10_s(2, start=110.0)
    (window,) = timeline_windows(timeline)
    engine = [(i.start_s, i.end_s) for i in window.intervals if i.lane == "engine 0"]
    assert engine == [(100.0, 103.0), (109.0, 113.0)]
    assert {i.lane for i in window.intervals} == {"trainer", "engine 0"}


def write_run(root: Path) -> RunPaths:
    """A run of one step, without a timeline."""
    paths = RunPaths(root)
    root.mkdir()
    paths.config.write_text("run: {seed: 0}\n")
    lags = {"staleness/frac_lag_0": 0.75, "staleness/frac_lag_1": 0.25}
    with MetricsLogger([JsonlSink(paths.metrics)]) as log:
        log.log(1, {"critic/score/mean": 0.5, "perf/trainer_idle_frac": 0.4, "perf/engine_idle_frac": 0.7, **lags})
    return paths


def test_the_report_of_a_run_with_a_timeline_draws_its_lanes(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "run")
    before = write_report(paths.root)
    assert "Timeline</h2>" not in before.html.read_text(encoding="utf-8")
    height = picture_height(before.png)
    append_timeline(paths.timeline, step_of_10_s(1, start=1.7e9, num_engines=20))
    after = write_report(paths.root)
    (drawing,) = re.findall(r"Timeline</h2>.*?</svg>", after.html.read_text(encoding="utf-8"), flags=re.DOTALL)
    for text in ("trainer", "engine 0", "engine 15", "waits: gen", "update_actor", "Step 1"):
        assert f">{text}</text>" in drawing
    # The first 16 of the 20.
    assert len(set(re.findall(r">engine \d+<", drawing))) == 16
    # At 150 dots per inch: title and two rows of panels, 6.26 inches; then 17 lanes of 0.26, frame and legend of 1.45.
    assert (height, picture_height(after.png)) == (939, 1819)


def test_shares_of_lags_and_of_idle_time_are_drawn(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "run").root).html.read_text(encoding="utf-8").replace("  ", " ")
    for text in ("lag 0 75%", "lag 1 25%", "trainer", "engine"):
        assert f">{text}</text>" in html


def picture_height(png: Path) -> int:
    return int.from_bytes(png.read_bytes()[20:24], "big")
