"""A command that works says what it does, and no run of it is silent for long."""

import io
import os
import re
import time
from pathlib import Path

import pytest

from megarl.host import stage
from megarl.host.activity import LiveStatus, current_activity, doing, shown
from tests.helpers.waiting import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for_two(text: str, stream: io.StringIO) -> None:
    """Wait until two different numbers of seconds have been shown behind the text."""
    shown_s = re.compile(re.escape(text) + r", (\d+) s")
    wait_until(lambda: len(set(shown_s.findall(stream.getvalue()))) >= 2, f"{text!r} twice", seen=stream.getvalue)


def test_the_innermost_activity_counts_and_texts_are_asked_for_anew() -> None:
    assert current_activity() is None
    samples: list[int] = []
    with doing("step 3"):
        with doing(lambda: f"{len(samples)} of 2 samples"):
            samples.append(1)
            what, since = current_activity() or ("", 0.0)
            assert what == "1 of 2 samples"
            assert time.time() - since < 10
        assert (current_activity() or ("",))[0] == "step 3"
    assert current_activity() is None


def test_a_log_gets_a_line_after_each_silence_and_none_between_activities() -> None:
    log = io.StringIO()
    with LiveStatus(stream=log, silence_s=0.6):
        with doing("starting the engines"):
            wait_for_two("… starting the engines", log)
        lines = log.getvalue().count("\n")
        time.sleep(1.5)
        assert log.getvalue().count("\n") <= lines + 1


def test_a_terminal_has_one_line_that_is_renewed_and_leaves_nothing_behind() -> None:
    terminal = Terminal()
    with LiveStatus(stream=terminal), doing("updating the actor"):
        wait_for_two("updating the actor", terminal)
    assert "…" not in terminal.getvalue()


def test_a_process_tells_its_stage_only_within_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "processes"
    monkeypatch.setattr(stage, "process_files", lambda: directory)
    stage.tell_stage("micro-batch 1 of 8")
    assert not directory.exists()
    directory.mkdir(mode=0o700)
    stage.tell_stage("micro-batch 2 of 8")
    assert stage.read_stage(str(directory), os.getpid()) == "micro-batch 2 of 8"
    assert stage.read_stage(str(directory), 1) == ""


def test_a_command_is_loading_only_until_its_first_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.host.activity._num_begun", [0])
    with shown():
        assert (current_activity() or ("",))[0] == "loading megarl"
        with doing("starting Ray"):
            assert (current_activity() or ("",))[0] == "starting Ray"
        assert (current_activity() or ("",))[0] == "working"
