"""Files and directories are replaced as a whole, by several writers at once too, while others read them."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from megarl.host.writing import put_directory, replacing, replacing_directory
from megarl.record.metrics import JsonlSink, MetricsLogger, RunPaths
from megarl.record.timeline import Interval, append_timeline, write_trace
from megarl.report import write_report


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> NoReturn:
        with replacing(path) as file:
            file.write_text("half")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_last_of_several_writers_wins(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    with replacing_directory(tmp_path / "d") as one, replacing_directory(tmp_path / "d") as two:
        (one / "one").touch()
        (two / "two").touch()
    assert [each.name for each in (tmp_path / "d").iterdir()] == ["one"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["d", "file"]


def test_a_directory_that_appears_meanwhile_is_replaced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, path = tmp_path / "new", tmp_path / "path"
    (new / "mine").mkdir(parents=True)
    rename, times = Path.rename, []

    def late(self: Path, target: Path) -> Path:
        times.append(self)
        if len(times) == 2:
            (path / "theirs").mkdir(parents=True)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    put_directory(new, path)
    assert [each.name for each in path.iterdir()] == ["mine"]
    assert list(tmp_path.iterdir()) == [path]


def run_of(root: Path) -> RunPaths:
    paths = RunPaths(root)
    paths.config.write_text("run: {name: a}\n")
    with MetricsLogger([JsonlSink(paths.metrics)]) as log:
        for step in (1, 2):
            log.log(step, {"critic/rule_score/mean": 0.5, "actor/loss": 0.1})
    append_timeline(paths.timeline, [Interval(lane="trainer", name="gen", start_s=1.0, end_s=2.0, step=1)])
    return paths


def test_readers_never_see_half_of_a_report_or_a_trace(tmp_path: Path) -> None:
    """Two processes' worth of writers, and a reader that looks as often as it can."""
    paths, ended = run_of(tmp_path), threading.Event()
    write_report(tmp_path)
    write_trace(paths.timeline, paths.trace)
    faults: list[str] = []

    def look() -> None:
        checks: dict[Path, Callable[[bytes], object]] = {
            paths.report_html: lambda content: content.index(b"</html>"),
            paths.report_png: lambda content: content.index(b"IEND"),
            paths.trace: json.loads,
        }
        while not ended.is_set():
            for path, check in checks.items():
                try:
                    check(path.read_bytes())
                except (ValueError, OSError) as error:
                    faults.append(f"{path.name}: {error}")

    reader = threading.Thread(target=look)
    reader.start()
    inode = os.stat(paths.report_html).st_ino
    write_report(tmp_path)
    for _ in range(20):
        write_trace(paths.timeline, paths.trace)
    ended.set()
    reader.join()
    assert faults == []
    assert os.stat(paths.report_html).st_ino != inode
    assert not list(tmp_path.glob("*.partial"))
