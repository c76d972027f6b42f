"""The directory of temporary files: short enough for Ray's sockets, and one in which they can be made."""

import errno
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from megarl.doctor.finding import Severity
from megarl.doctor.machine import temp_finding
from megarl.errors import ConfigError
from megarl.host import temp_dir
from megarl.host.janitor import RunScope, clean_up, scopes_of
from megarl.host.temp_dir import MOST_BYTES, choose_temp_root, make_temp_dir, temp_root, unsuited
from megarl_sandbox import places
from tests.helpers.second_user import UID, as_nobody, needs_second_user


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a short path, the only usual one; pytest's own paths are long."""
    path = Path("/tmp") / f"t{os.getpid()}"
    path.mkdir()
    monkeypatch.setattr(places, "USUAL", (path,))
    yield path
    path.rmdir()


def test_the_longest_path_has_room_for_rays_longest_socket() -> None:
    """107 bytes as unix(7) has it, of which Ray 2.60 takes 64: a time, a process id and two names."""
    session = "session_2026-11-26_09-52-21_123456_4194304"
    longest = f"{'x' * MOST_BYTES}/mr-{'1' * 8}/r/{session}/sockets/plasma_store"
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
    made = make_temp_dir("0123abcd")
    # Nobody can foresee its name, nor enter it.
    assert re.fullmatch(r"mr-[a-z0-9_]{8}", made.relative_to(short).name)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    shutil.rmtree(made)
    finding = temp_finding(choice)
    assert finding.status is Severity.WARN
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
    def refuse(*_: object, **__: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(temp_dir.tempfile, "mkdtemp", refuse)
    assert said in (unsuited(short) or "")


def test_too_little_room(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_dir, "SMALLEST_MIB", 1 << 40)
    assert "MiB are free" in (unsuited(short) or "")


def test_no_directory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "USUAL", (Path("/nowhere"),))
    monkeypatch.delenv("TMPDIR", raising=False)
    with pytest.raises(ConfigError, match=r"suits Ray: /nowhere: no such directory; set TMPDIR to a local directory"):
        temp_root()
    assert temp_finding(choose_temp_root()).status is Severity.MISSING


def test_leftovers_are_found_wherever_they_are(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that chose another directory than this process would."""
    monkeypatch.delenv("TMPDIR", raising=False)
    run = make_temp_dir("0000abcd")
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    assert run.parent == short
    assert RunScope(run_id="0000abcd").leftovers() == [run]
    shutil.rmtree(run)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_where_others_can_replace_what_lies_there(short: Path, mode: int) -> None:
    """In such a directory, in a directory below one, and behind a link that lies in one."""
    below, link = short / "below", short / "link"
    below.mkdir()
    link.symlink_to("/var/tmp")
    short.chmod(mode)
    for place in (short, below, link):
        assert unsuited(place) == f"another user can replace what lies in {short}"
    short.chmod(mode | stat.S_ISVTX)
    assert [unsuited(place) for place in (short, below, link)] == [None] * 3
    below.rmdir()
    link.unlink()


@needs_second_user
def test_what_others_own_is_passed_over(short: Path) -> None:
    """Its owner can replace what lies there, and can turn a link to another place."""
    theirs, link = short / "theirs", short / "link"
    theirs.mkdir()
    link.symlink_to("/var/tmp")
    for place in (theirs, link):
        os.chown(place, UID, UID, follow_symlinks=False)
        assert unsuited(place) == f"another user can replace what lies in {place}"
    theirs.rmdir()
    link.unlink()


PLANT = """
import os, sys
root, victim = sys.argv[1:]
for name in ("mr-planted1", "mr-planted2"):
    os.mkdir(f"{root}/{name}", 0o700)
    with open(f"{root}/{name}/run", "w") as file:
        file.write("0000abcd")
os.symlink(f"{root}/mr-planted2", f"{root}/mr-linked01")
os.symlink(victim, f"{root}/mr-linked02")
os.symlink(victim, "/dev/shm/megarl-0000abcd-linked")
os.mkdir("/dev/shm/megarl-0000abcd-planted")
os.mknod("/dev/shm/megarl-0000abcd-file")
"""


@needs_second_user
def test_what_others_plant_is_neither_found_nor_touched(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under every name that the run's directory and its shared memory could have, and links to what is dear to us."""
    monkeypatch.delenv("TMPDIR", raising=False)
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "run").write_text("0000abcd")
    short.chmod(0o1777)
    planted = as_nobody(PLANT, short, victim)
    assert planted.returncode == 0, planted.stderr
    theirs = [*short.iterdir(), *Path("/dev/shm").glob("megarl-0000abcd-*")]
    assert len(theirs) == 7
    own = make_temp_dir("0000abcd")
    (own / "r").mkdir()
    (own / "r" / "link").symlink_to(victim)
    scope = RunScope(run_id="0000abcd")
    assert scope.temp_dirs() == scope.leftovers() == [own]
    assert [found.run_id for found in scopes_of("0000")] == ["0000abcd"]
    clean_up(scope, noted=[file for file in theirs if file.parent == Path("/dev/shm")])
    assert not own.exists()
    assert all(path.is_symlink() or path.exists() for path in theirs)
    assert (victim / "run").read_text() == "0000abcd"
    for path in theirs:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
