"""Processes tell how far they have come, and helpers that they start tell it by what they log."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.host.stage import (
    STAGE_FILE_VARIABLE,
    logged_stages,
    make_process_files,
    note_foreign,
    process_files,
    read_foreign,
    read_stage,
    tell_stage,
)

# A helper process that configures its logging by a file, as vLLM's core and workers do; its own logger has no handler.
HELPER = """
import json, logging.config, os
logging.config.dictConfig(json.load(open(os.environ["LOGGING"])))
logging.getLogger("vllm.worker").info("first line\\nsecond line")
logging.getLogger("vllm.worker").debug("too detailed")
logging.getLogger("other").warning("of something else")
"""
# What vLLM itself does with VLLM_LOGGING_CONFIG_PATH: at its import, and again whenever an engine is built.
VLLM = """
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger
configure_logging(LoggingConfig())
init_logger("vllm.megarl_test").info("built anew")
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run's directory of stages."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(STAGE_FILE_VARIABLE, "of another test")
    return str(make_process_files())


def log_in_helper(code: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a helper prints."""
    file = tmp_path / "logging.json"
    file.write_text(json.dumps(logged_stages("vllm", level=level)))
    monkeypatch.setenv("LOGGING", str(file))
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(file))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(("level", "num_printed", "has_details"), [("WARNING", 0, 0), ("INFO", 1, 0), ("debug", 1, 1)])
def test_a_helpers_log_line_is_the_stage(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, num_printed: int, has_details: int
) -> None:
    tell_stage("a text that is longer than the line that follows")
    printed = log_in_helper(HELPER, level, tmp_path, monkeypatch)
    assert read_stage(directory, os.getpid()) == "first line"
    assert printed.count("first line") == num_printed
    assert printed.count("too detailed") == has_details


def test_a_process_that_is_done_gets_no_stage_of_its_helpers(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_stage("at work")
    tell_stage("")
    tell_stage("")
    log_in_helper(HELPER, "WARNING", tmp_path, monkeypatch)
    assert read_stage(directory, os.getpid()) == ""


def test_vllm_logs_so_however_often_it_configures_logging(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_stage("importing vLLM")
    log_in_helper(VLLM, "WARNING", tmp_path, monkeypatch)
    assert read_stage(directory, os.getpid()) == "built anew"


def test_outside_of_a_run_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tell_stage("at work")
    assert not list(tmp_path.iterdir())


def test_what_others_may_write_to_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a user's own Ray has started this process, with everybody's directory for temporary files."""
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    dear = tmp_path / "dear"
    dear.write_text("unchanged")
    planted = process_files()
    planted.mkdir(mode=0o777)
    planted.chmod(0o777)
    (planted / f"{os.getpid()}.stage").symlink_to(dear)
    tell_stage("at work")
    assert dear.read_text() == "unchanged"
    made = make_process_files()
    assert made != planted
    assert made.parent.parent == tmp_path
    assert stat.S_IMODE(made.parent.stat().st_mode) == stat.S_IMODE(made.stat().st_mode) == 0o700
    # Processes that this one starts find it too.
    assert os.environ["TMPDIR"] == str(made.parent)
    tell_stage("at work")
    assert read_stage(str(made), os.getpid()) == "at work"


def test_what_processes_of_a_run_have_closed_adds_up(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    for listener, number in (("gloo", 3), ("judge_server", 1), ("gloo", 40)):
        note_foreign(listener, number)
    assert read_foreign() == {"gloo": 43, "judge_server": 1}
    assert "gloo: closed 40 connections of clients that showed no key" in capsys.readouterr().out
    # What others may write to counts nothing, and is not written.
    Path(directory).chmod(0o777)
    note_foreign("gloo", 1)
    assert read_foreign() == {"gloo": 43, "judge_server": 1}
