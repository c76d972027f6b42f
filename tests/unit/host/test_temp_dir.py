"""The directory of temporary files: short enough for Ray's sockets, and one in which they can be made."""

import errno
import os
from pathlib import Path

import pytest

from megarl.doctor.finding import Status
from megarl.doctor.machine import temp_finding
from megarl.errors import ConfigError
from megarl.host import temp_dir
from megarl.host.janitor import RunScope
from megarl.host.temp_dir import MOST_BYTES, choose_temp_root, temp_root, unsuited


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a short path, the only usual one; pytest's own paths are long."""
    path = Path("/tmp") / f"t{os.getpid()}"
    path.mkdir()
    monkeypatch.setattr(temp_dir, "USUAL", (path,))
    yield path
    path.rmdir()


def test_the_longest_path_has_room_for_rays_longest_socket() -> None:
    """107 bytes as unix(7) has it, of which Ray 2.60 takes 64: a time, a process id and two names."""
    session = "session_2026-11-26_09-52-21_123456_4194304"
    longest = f"{'x' * MOST_BYTES}/mr-{'1' * 8}-1-1/r/{session}/sockets/plasma_store"
    assert len(longest) == 107


def test_a_directory_that_is_too_long_is_passed_over(
    tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / ("a_long_name" * 8)
    given.mkdir()
    monkeypatch.setenv("TMPDIR", str(given))
    choice = choose_temp_root()
    assert choice.root == short
    assert choice.problems == (
        f"{given}: its path has {len(str(given))} bytes, of which Ray's sockets leave room for {MOST_BYTES}",
    )
    assert RunScope(run_id="0123abcd").temp_dir == short / "mr-0123abcd"
    finding = temp_finding(choice)
    assert finding.status is Status.WARN
    assert str(given) in finding.found
    assert finding.advice.startswith("set TMPDIR to a local directory whose path has at most")


def test_what_is_no_directory(short: Path) -> None:
    assert unsuited(short) is None
    assert unsuited(short / "none") == "no such directory"
    (short / "file").touch()
    assert unsuited(short / "file") == "no such directory"
    (short / "file").unlink()


@pytest.mark.parametrize(("code", "said"), [(errno.EROFS, "Read-only"), (errno.EACCES, "Permission denied")])
def test_where_nothing_can_be_written(short: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    def refuse(**_: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(temp_dir.tempfile, "mkdtemp", refuse)
    assert said in (unsuited(short) or "")


def test_too_little_room(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_dir, "SMALLEST_MIB", 1 << 40)
    assert "MiB are free" in (unsuited(short) or "")


def test_no_directory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_dir, "USUAL", (Path("/nowhere"),))
    monkeypatch.delenv("TMPDIR", raising=False)
    with pytest.raises(ConfigError, match=r"suits Ray: /nowhere: no such directory; set TMPDIR to a local directory"):
        temp_root()
    assert temp_finding(choose_temp_root()).status is Status.MISSING


def test_leftovers_are_found_wherever_they_are(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that chose another directory than this process would."""
    run = Path("/tmp") / f"t{os.getpid()}" / "mr-0000abcd"
    run.mkdir()
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    assert RunScope(run_id="0000abcd").leftovers() == [run]
    run.rmdir()
