"""Metrics written and read back: sinks, torn and bad lines, timers, rollout files."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.errors import DataError, RunStopped
from megarl.host.exit_codes import RunOutcome
from megarl.record import json_lines
from megarl.record.columns import read_tables
from megarl.record.json_lines import append_lines, open_lines, read_lines, truncate_lines
from megarl.record.metrics import (
    JsonlSink,
    MetricsLogger,
    MetricsRecord,
    RunPaths,
    Summary,
    Timers,
    last_metrics,
    read_metrics,
    summarize,
)
from megarl.record.rollouts import RolloutRecord, read_rollouts, write_rollouts
from megarl.record.trackers import TensorBoardSink, is_drawn
from megarl.record.turns import Turn

ROLLOUT = RolloutRecord(
    step=12,
    uid="q7",
    sample_index=3,
    data_source="sums",
    prompt="<|im_start|>user\n3+4=?",
    response="3 7\n#### 7<|im_end|>",
    ground_truth="7",
    reward=1.0,
    finish_reason="stop",
    num_prompt_tokens=9,
    num_response_tokens=11,
    correct=True,
    details='{"format": 1.0}',
)


class ListSink:
    """Keeps records, and how the run ended."""

    def __init__(self) -> None:
        self.records: list[MetricsRecord] = []
        self.outcome: RunOutcome | None = None

    def write(self, record: MetricsRecord) -> None:
        self.records.append(record)

    def close(self, outcome: RunOutcome) -> None:
        self.outcome = outcome


def test_logger_writes_the_documented_line_format(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsLogger([JsonlSink(path)], clock=lambda: 1700000000.5) as logger:
        logger.log(0, {"val/test_score/sums": 0.375})
        logger.log(1, {"critic/score/mean": 0.5, "actor/lr": 1e-4})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 0, "time_s": 1700000000.5, "metrics": {"val/test_score/sums": 0.375}},
        {"step": 1, "time_s": 1700000000.5, "metrics": {"critic/score/mean": 0.5, "actor/lr": 1e-4}},
    ]


def test_every_line_is_on_disk_before_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    synced: list[bytes] = []
    # What the file holds when the system is asked to write it out.
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
    with MetricsLogger([JsonlSink(path)], clock=lambda: 5.0) as logger:
        logger.log(1, {"a": 1.0})
        assert read_metrics(path) == [MetricsRecord(step=1, time_s=5.0, metrics={"a": 1.0})]
        assert synced == [path.read_bytes()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_value_names_metric_and_step_and_reaches_no_sink(value: float) -> None:
    sink = ListSink()
    with MetricsLogger([sink]) as logger, pytest.raises(DataError, match=r"actor/pg_loss at step 7: got"):
        logger.log(7, {"actor/grad_norm": 1.0, "actor/pg_loss": value})
    assert sink.records == []


def test_logger_closes_its_sinks_when_the_run_fails() -> None:
    sink = ListSink()
    with pytest.raises(KeyError), MetricsLogger([sink]):
        raise KeyError("boom")
    assert sink.outcome == ("failed", 1, "'boom'")


def test_torn_last_line_is_left_out_and_does_not_spoil_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time_s": 2.0, "metrics": {"a": 1.0}}\n{"step": 2, "time_s": 3.0, "metr')
    assert [record.step for record in read_metrics(path)] == [1]
    with MetricsLogger([JsonlSink(path)], clock=lambda: 9.0) as logger:
        logger.log(2, {"a": 4.0})
    assert read_metrics(path) == [
        MetricsRecord(step=1, time_s=2.0, metrics={"a": 1.0}),
        MetricsRecord(step=2, time_s=9.0, metrics={"a": 4.0}),
    ]


def test_line_torn_inside_a_character_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "time_s": 2.0, "metrics": {}}\n{"step": 2, "metrics": {"\xc3')
    assert [record.step for record in read_metrics(path)] == [1]


@pytest.mark.parametrize(
    "bad",
    [
        '{"step": 2, "time_s": 3.0, "metr',
        '{"step": 2, "time_s": 3.0}',
        "[1, 2]",
        '{"step": 2, "time_s": 3.0, "metrics": {"a": NaN}}',
        '{"step": 2, "time_s": 3.0, "metrics": {"a": null}}',
        '{"step": 2, "time_s": 3.0, "metrics": [1.0]}',
    ],
)
def test_any_other_bad_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "time_s": 2.0, "metrics": {"a": 1.0}}'
    path.write_text(f"{good}\n{bad}\n{good}\n")
    for read in (read_metrics, read_tables):
        with pytest.raises(DataError, match=r"metrics\.jsonl line 2: got"):
            read(path)


def test_columns_hold_what_records_say(tmp_path: Path) -> None:
    """A record that lacks a metric has NaN; one with a new metric begins a table; a torn line is left out."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"a": 1.0, "b": 2}, {"b": 3.0}, {}, {"b": 4.0, "é": -1e-300}]
    lines = [json.dumps({"step": i, "time_s": 10.0 + i, "metrics": row}) for i, row in enumerate(rows)]
    path.write_text("\n".join([*lines, ""]))
    first, second = read_tables(path)
    assert (first.names, second.names) == (("a", "b"), ("a", "b", "é"))
    assert (first.steps.tolist(), second.steps.tolist()) == ([0, 1, 2], [3])
    assert (first.times.tolist(), second.times.tolist()) == ([10.0, 11.0, 12.0], [13.0])
    nan = float("nan")
    np.testing.assert_array_equal(first.values, [[1.0, 2.0], [nan, 3.0], [nan, nan]])
    np.testing.assert_array_equal(second.values, [[nan, 4.0, -1e-300]])
    path.write_text("\n".join([*lines, lines[0][:20]]))
    assert [table.names for table in read_tables(path)] == [("a", "b"), ("b",), (), ("b", "é")]


def test_a_file_that_rotates_keeps_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has 13 bytes. A file of three is put aside: of ten lines the last is left, and the three before it."""
    monkeypatch.setattr(json_lines, "ROTATED_BYTES", 36)
    path = tmp_path / "lines.jsonl"
    for step in range(10, 20):
        with open_lines(path, rotates=True) as file:
            append_lines(file, [{"step": step}])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lines.jsonl", "lines.older.jsonl"]

    def steps() -> list[int]:
        return read_lines(path, lambda row: int(row["step"]), expected="a step")

    assert steps() == [16, 17, 18, 19]
    truncate_lines(path, 17)
    assert steps() == [16, 17]


@pytest.mark.parametrize("text", ["", "torn", "1\n", "1\ntorn", "1\n234567\n", "1\n234567\n89012345"])
def test_a_torn_line_is_found_from_the_end_of_a_long_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 3)
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    open_lines(path).close()
    assert path.read_text() == text[: text.rfind("\n") + 1]


@pytest.mark.parametrize(
    "bad", [bytes(64), b'{"step": 2, "ti{"step": 3}', b"<<<<<<< HEAD", b'{"a": 1}', b"3", b"\xff\xfe{"]
)
def test_a_resumed_run_goes_on_without_damaged_lines(
    tmp_path: Path, bad: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "time_s": 1.0, "metrics": {}}).encode() for step in (1, 2, 3)]
    path.write_bytes(b"\n".join([lines[0], bad, *lines[1:], b""]))
    truncate_lines(path, 2)
    assert path.read_bytes().splitlines() == lines[:2]
    assert capsys.readouterr().out == (f"warning: {path}: got no record in line 2, as a crash may leave; removed it\n")


def test_tensorboard_event_files_hold_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLogger([TensorBoardSink(tmp_path)], clock=lambda: 50.0) as logger:
        logger.log(1, {"critic/score/mean": 0.25})
        logger.log(2, {"critic/score/mean": 0.5})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = [(event.step, event.value, event.wall_time) for event in events.Scalars("critic/score/mean")]
    assert scalars == [(1, 0.25, 50.0), (2, 0.5, 50.0)]
    # 9,999 values, 9,000 of the next 90,000, and the 100,000th.
    assert sum(map(is_drawn, range(1, 100_001))) == 19_000


def test_summarize() -> None:
    assert summarize([3.0, -1.0, 1.0]) == Summary(mean=1.0, max=3.0, min=-1.0)
    assert summarize([0.5]).as_metrics("critic/score") == {
        "critic/score/mean": 0.5,
        "critic/score/max": 0.5,
        "critic/score/min": 0.5,
    }
    with pytest.raises(DataError, match="at least one value"):
        summarize([])


def test_timers_add_up_per_phase_and_restart_after_pop() -> None:
    ticks: Iterator[float] = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 100.0, 100.5])
    timers = Timers(clock=lambda: next(ticks))
    with timers("step"):  # 0 to 20
        with timers("gen"):  # 1 to 3
            pass
        with timers("gen"):  # 10 to 14
            pass
    assert timers.pop() == {"timing_s/gen": 6.0, "timing_s/step": 20.0}
    with timers("gen"):
        pass
    assert timers.pop() == {"timing_s/gen": 0.5}
    assert timers.pop() == {}


def test_timers_keep_the_time_of_a_phase_that_raised() -> None:
    ticks = iter([2.0, 5.0])
    timers = Timers(clock=lambda: next(ticks))
    with pytest.raises(ZeroDivisionError), timers("reward"):
        raise ZeroDivisionError
    assert timers.pop() == {"timing_s/reward": 3.0}


def test_rollouts_round_trip_with_the_documented_columns(tmp_path: Path) -> None:
    path = RunPaths(tmp_path).rollouts(12)
    write_rollouts(path, [ROLLOUT])
    assert path == tmp_path / "rollouts" / "step_000012.parquet"
    assert read_rollouts(path) == [ROLLOUT]
    assert [(field.name, str(field.type)) for field in pq.read_schema(path)] == [
        ("step", "int64"),
        ("uid", "string"),
        ("sample_index", "int64"),
        ("data_source", "string"),
        ("prompt", "string"),
        ("response", "string"),
        ("ground_truth", "string"),
        ("reward", "double"),
        ("finish_reason", "string"),
        ("num_prompt_tokens", "int64"),
        ("num_response_tokens", "int64"),
        ("correct", "bool"),
        ("details", "string"),
        ("tokens", "list<element: string>"),
        ("rollout_logprobs", "list<element: double>"),
        ("old_logprobs", "list<element: double>"),
        ("advantage", "list<element: double>"),
        ("hint_gain", "list<element: double>"),
        ("base_advantage", "list<element: double>"),
        ("divergence", "list<element: double>"),
        (
            "turns",
            "list<element: struct<author: string, text: string, reward: double, num_tokens: int64, "
            "parent: int64, num_kept: int64>>",
        ),
        ("num_calls", "int64"),
    ]
    assert [file.name for file in path.parent.iterdir()] == ["step_000012.parquet"]


def test_rollouts_of_tokens_and_those_of_earlier_versions(tmp_path: Path) -> None:
    hinted = replace(
        ROLLOUT, tokens=("7", "<|im_end|>"), hint_gain=(0.5, -1.0), base_advantage=(1.0, 1.0), advantage=(1.2, 0.8)
    )
    hinted = replace(hinted, turns=(Turn(author="policy", text="7", reward=0.5, num_tokens=1),), num_calls=2)
    shaped = replace(hinted, rollout_logprobs=(None, -0.5), old_logprobs=(-2.0, -0.5))
    path = RunPaths(tmp_path).rollouts(1)
    write_rollouts(path, [shaped, ROLLOUT])
    assert read_rollouts(path) == [shaped, ROLLOUT]
    # These had the tokens of turns with them.
    old = pq.read_table(path).drop_columns(["turns", "rollout_logprobs", "old_logprobs"])
    turn = {"author": "policy", "text": "7", "reward": 0.5, "tokens": ["7"], "logprobs": [-1.0]}
    pq.write_table(old.append_column("turns", pa.array([[turn], []])), path)
    assert read_rollouts(path) == [hinted, ROLLOUT]
    later = ["tokens", "hint_gain", "base_advantage", "advantage", "divergence", "turns", "num_calls"]
    pq.write_table(pq.read_table(path).drop_columns(later), path)
    assert read_rollouts(path) == [ROLLOUT, ROLLOUT]


def test_recorded_rollouts_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in (1_000_000, 5, 999_999):
        write_rollouts(paths.rollouts(step), [ROLLOUT])
    assert [path.stem for path in paths.recorded_rollouts()] == ["step_000005", "step_999999", "step_1000000"]


def test_files_that_are_no_rollouts_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text.parquet"
    text.write_text("not parquet")
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"step": [1], "uid": ["a"]}), other)
    for path in (text, other, tmp_path / "missing.parquet"):
        with pytest.raises(DataError, match=path.name):
            read_rollouts(path)


def test_the_ends_of_all_destinations_are_waited_for_together() -> None:
    """Each ends only once the other does: two trackers whose services do not answer keep a run no longer than one."""
    both, ended = threading.Barrier(2, timeout=10), []

    class Waiting:
        def write(self, record: MetricsRecord) -> None: ...

        def close(self, outcome: RunOutcome) -> None:
            both.wait()
            ended.append(outcome.state)

    with pytest.raises(RunStopped), MetricsLogger([Waiting(), Waiting()]):
        raise RunStopped("by a signal")
    assert ended == ["stopped", "stopped"]


def test_the_last_records_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of the file is read first, a line that begins before it is left out, and no other."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(1, 31):
        sink.write(MetricsRecord(step=step, time_s=0.0, metrics={"x": 1.0} if step % 3 else {"v": 1.0}))
    sink.close()
    for size in (1, 40, 57, 64, 1 << 20):
        monkeypatch.setattr("megarl.record.metrics.TAIL_BYTES", size)
        assert [record.step for record in last_metrics(path, "v", 3)] == [24, 27, 30]
    assert len(last_metrics(path, "v", 99)) == 10
    with path.open("a", encoding="utf-8") as file:
        file.write("no JSON\n")
    monkeypatch.setattr("megarl.record.metrics.TAIL_BYTES", 64)
    with pytest.raises(DataError, match="the end: got 'no JSON'"):
        last_metrics(path, "v", 1)
