"""Who worked when: the timeline file, and the idle shares of trainer and engines, worked out by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.errors import DataError
from megarl.record.metrics import Stage, Timers
from megarl.record.timeline import (
    Interval,
    append_timeline,
    covered_s,
    idle_metrics,
    read_timeline,
    step_intervals,
)

GEN = Interval(lane="trainer", name="gen", start_s=1700000000.25, end_s=1700000003.5, step=1)
BUSY = Interval(lane="engine 0", name="generate", start_s=1700000000.5, end_s=1700000003.0, step=2)


def test_a_timeline_is_read_back_as_it_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    append_timeline(path, [GEN])
    append_timeline(path, [BUSY])
    assert read_timeline(path) == [GEN, BUSY]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "lane": "trainer",
        "name": "gen",
        "start_s": 1700000000.25,
        "end_s": 1700000003.5,
        "step": 1,
    }


@pytest.mark.parametrize(
    "bad",
    [
        "[]",
        '{"lane": "trainer", "name": "gen", "start_s": 1.0, "step": 1}',
        '{"lane": "trainer", "name": "gen", "start_s": 2.0, "end_s": 1.0, "step": 1}',
        '{"lane": "trainer", "name": "gen", "start_s": NaN, "end_s": 1.0, "step": 1}',
        '{"lane": "trainer", "name": "gen", "start_s": 1.0, "end_s": Infinity, "step": 1}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "timeline.jsonl"
    append_timeline(path, [GEN])
    with path.open("a") as file:
        file.write(f"{bad}\n")
    append_timeline(path, [BUSY])
    with pytest.raises(DataError, match=r"timeline\.jsonl line 2: got .* expected an object of lane, name"):
        read_timeline(path)
    with pytest.raises(DataError, match=r"no timeline at .*other\.jsonl"):
        read_timeline(tmp_path / "other.jsonl")


def test_stages_are_dated_and_those_of_a_step_stay_in_order() -> None:
    """The clock starts anywhere; when it shows 20, Unix time is 1020. Setting the time back is not seen in between."""
    ticks = iter([0.0, 1.0, 3.0, 3.0, 14.0, 15.0, 20.0, 30.0, 31.0, 40.0])
    now = iter([1020.0, 900.0])
    timers = Timers(clock=lambda: next(ticks), unix_time=lambda: next(now))
    with timers("step"):
        with timers("gen"):
            pass
        with timers("update_actor"):
            pass
    assert timers.stages() == [
        Stage("gen", 1001.0, 1003.0),
        Stage("update_actor", 1003.0, 1014.0),
        Stage("step", 1000.0, 1015.0),
    ]
    assert timers.pop() == {"timing_s/gen": 2.0, "timing_s/update_actor": 11.0, "timing_s/step": 15.0}
    with timers("testing"):
        pass
    assert timers.stages() == [Stage("testing", 890.0, 891.0)]


def test_intervals_of_a_step_have_a_lane_for_the_trainer_and_one_for_each_engine() -> None:
    stages = [Stage("gen", 1.0, 4.0), Stage("sync", 4.0, 5.0), Stage("step", 1.0, 5.5)]
    engines: dict[str, Sequence[tuple[float, float]]] = {"0": [(1.0, 2.0), (2.5, 4.0)], "1": [], "2": [(3.0, 2.0)]}
    got = [(i.lane, i.name, i.start_s, i.end_s, i.step) for i in step_intervals(7, stages, engines)]
    assert got == [
        ("trainer", "gen", 1.0, 4.0, 7),
        ("trainer", "sync", 4.0, 5.0, 7),
        ("step", "step", 1.0, 5.5, 7),
        ("engine 0", "generate", 1.0, 2.0, 7),
        ("engine 0", "generate", 2.5, 4.0, 7),
        ("engine 2", "generate", 3.0, 3.0, 7),  # its clock was set back meanwhile
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], 0.0),
        ([(12.0, 14.0), (16.0, 17.0)], 3.0),  # a gap
        ([(12.0, 14.0), (13.0, 17.0)], 5.0),  # an overlap
        ([(13.0, 14.0), (12.0, 18.0)], 6.0),  # one within another, out of order
        ([(12.0, 14.0), (14.0, 15.0)], 3.0),  # one after another
        ([(5.0, 11.0), (19.0, 30.0)], 2.0),  # across both borders
        ([(0.0, 9.0), (21.0, 22.0)], 0.0),  # outside
        ([(0.0, 99.0)], 10.0),
    ],
)
def test_time_covered_in_the_window_10_to_20(times: list[tuple[float, float]], expected: float) -> None:
    assert covered_s(times, (10.0, 20.0)) == expected


def test_idle_shares() -> None:
    """A step of 8 s. The trainer works 4 to 7 (ref and values overlap) and syncs 7 to 8: idle are 4 of 8 seconds."""
    stages = [
        Stage("save_checkpoint", 90.0, 99.0),  # before the step
        Stage("gen", 100.0, 103.0),
        Stage("reward", 103.0, 104.0),
        Stage("ref", 104.0, 106.0),
        Stage("values", 105.0, 106.0),
        Stage("update_actor", 106.0, 107.0),
        Stage("sync", 107.0, 108.0),
        Stage("step", 100.0, 108.0),
    ]
    assert idle_metrics(stages, {}) == {"perf/trainer_idle_frac": 0.5}
    # Busy 100 to 104 of it, all of it, and none of it: (1/2 + 0 + 1) / 3 idle.
    engines = {"0": [(95.0, 104.0)], "1": [(100.0, 105.0), (104.0, 120.0)], "2": []}
    assert idle_metrics(stages, engines) == {"perf/trainer_idle_frac": 0.5, "perf/engine_idle_frac": 0.5}
    assert idle_metrics(stages[:-1], engines) == {}
