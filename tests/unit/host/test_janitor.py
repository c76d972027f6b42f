"""The janitor ends what carries its run's id, unlinks the run's names, and touches nothing else."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.host.janitor import (
    CONTAINERS,
    OWNER_VARIABLE,
    RUN_ID_VARIABLE,
    SANDBOX,
    SHM_DIR,
    Janitor,
    RunScope,
    clean_up,
    new_sandbox,
    program_variables,
    remove_orphans,
    scopes_of,
)
from megarl.host.temp_dir import make_temp_dir
from tests.helpers.waiting import wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
# Prints once its handler is set, so that no signal comes too early.
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)",
]
# A driver that starts a child, makes the run's names and says their id.
DRIVER = """
import subprocess, sys, time
from megarl.host.janitor import Janitor
janitor = Janitor()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
janitor.scope.new_shm_file("weights").write_bytes(b"w")
(janitor.temp_dir / "socket").touch()
print(janitor.scope.run_id, child.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def scope() -> Iterator[RunScope]:
    """A run whose names exist."""
    scope = RunScope(run_id=uuid.uuid4().hex[:8])
    scope.new_shm_file("weights").write_bytes(b"w")
    (make_temp_dir(scope.run_id) / "session").mkdir()
    yield scope
    clean_up(scope)


def start(command: list[str], run_id: str | None) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
    if run_id is not None:
        environment[RUN_ID_VARIABLE] = run_id
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def test_names_of_shared_memory_carry_the_id() -> None:
    scope = RunScope(run_id="0123abcd")
    files = [scope.new_shm_file("weights") for _ in range(2)]
    # With 128 random bits, of which the id, which logs show, tells nothing.
    assert all(re.fullmatch("/dev/shm/megarl-0123abcd-weights-[0-9a-f]{32}", str(file)) for file in files)
    assert files[0] != files[1]


def test_runs_are_found_by_how_their_ids_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts of one job, not those of a job whose number only begins alike."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(root))
    for run_id in ("7-0-0", "7-1-3", "71-0-0"):
        make_temp_dir(run_id)
    assert sorted(scope.run_id for scope in scopes_of("7-")) == ["7-0-0", "7-1-3"]
    shutil.rmtree(root)


def test_clean_up_ends_the_run_and_nothing_else(scope: RunScope) -> None:
    ours = [start(SLEEP, scope.run_id), start(STUBBORN, scope.run_id)]
    # An id that begins like ours is another run's.
    foreign = [start(SLEEP, None), start(SLEEP, scope.run_id + "0")]
    foreign_file = SHM_DIR / f"megarl-{scope.run_id}0-weights"
    foreign_file.write_bytes(b"w")
    try:
        assert ours[1].stdout is not None
        ours[1].stdout.readline()
        assert sorted(scope.processes()) == sorted(p.pid for p in ours)
        clean_up(scope)
        assert [p.wait(5) for p in ours] == [-signal.SIGTERM, -signal.SIGKILL]
        assert [p.poll() for p in foreign] == [None, None]
        assert scope.leftovers() == []
        assert foreign_file.exists()
    finally:
        foreign_file.unlink()
        for process in (*ours, *foreign):
            process.kill()
            process.wait()


def test_containers_that_sandboxes_have_noted_are_removed(
    scope: RunScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    clean_up(RunScope(run_id="none"))
    assert not (tmp_path / "asked").exists()
    for sandbox, name in (("a", "megarl-1"), ("b", "megarl-2")):
        notes = scope.temp_dirs()[0] / f"{SANDBOX}{sandbox}" / CONTAINERS
        notes.mkdir(parents=True)
        (notes / name).touch()
    clean_up(scope)
    asked = (tmp_path / "asked").read_text().split()
    assert (asked[:2], {*asked[2:]}) == (["rm", "--force"], {"megarl-1", "megarl-2"})
    assert scope.leftovers() == []


def test_what_an_environment_worker_left_is_removed_while_the_run_goes_on(
    scope: RunScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    dead = start(["true"], scope.run_id)
    dead.wait()
    temp_dir = scope.temp_dirs()[0]
    monkeypatch.setattr(tempfile, "tempdir", str(temp_dir))
    monkeypatch.setenv(RUN_ID_VARIABLE, scope.run_id)
    mine = new_sandbox()
    left = temp_dir / f"{SANDBOX}{dead.pid}-x"
    for sandbox in (mine, left):
        (sandbox / CONTAINERS).mkdir(parents=True)
        (sandbox / CONTAINERS / f"megarl-of-{sandbox.name}").touch()
    programs = [
        subprocess.Popen(SLEEP, env={**program_variables(), **owner}, start_new_session=True)
        for owner in ({}, {OWNER_VARIABLE: str(dead.pid)})
    ]
    try:
        assert wait_until(lambda: len(scope.processes()) == 2, "both programs")
        assert remove_orphans(scope, temp_dir) == {left}
        assert programs[1].wait(5) == -signal.SIGKILL
        assert programs[0].poll() is None
        assert (mine.exists(), left.exists()) == (True, False)
        assert (tmp_path / "asked").read_text() == f"rm --force megarl-of-{left.name}\n"
        left.mkdir()
        assert remove_orphans(scope, temp_dir, removed=[left]) == set()
    finally:
        for process in programs:
            process.kill()
            process.wait()


def test_a_process_that_is_only_unreaped_is_not_alive(scope: RunScope) -> None:
    process = start(SLEEP, scope.run_id)
    process.kill()
    status = psutil.Process(process.pid).status
    wait_until(lambda: status() == psutil.STATUS_ZOMBIE, "the end of the process", seen=status)
    assert scope.processes() == []
    process.wait()


def test_close_returns_when_everything_is_gone() -> None:
    janitor = Janitor()
    child = subprocess.Popen(SLEEP)
    janitor.scope.new_shm_file("weights").write_bytes(b"w")
    assert os.environ[RUN_ID_VARIABLE] == janitor.scope.run_id
    # The kernel ends the wait of Popen a moment before /proc shows the new process's environment.
    assert wait_until(janitor.scope.processes, "the child") == [child.pid]
    janitor.close()
    assert child.wait(5) == -signal.SIGTERM
    assert janitor.scope.leftovers() == []
    assert RUN_ID_VARIABLE not in os.environ


@pytest.mark.parametrize("num_files", [0, 1100])
def test_a_killed_driver_leaves_nothing(num_files: int) -> None:
    """Also one that has opened more files than `select` can name."""
    opened = f"files = [open('/dev/null') for _ in range({num_files})]\n"
    raise_limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
    driver = subprocess.Popen([sys.executable, "-c", raise_limit + opened + DRIVER], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    run_id, child = driver.stdout.readline().decode().split()
    scope = RunScope(run_id=run_id)
    assert psutil.pid_exists(int(child))
    assert len(scope.leftovers()) == 2
    driver.kill()
    driver.wait()

    def left() -> list[object]:
        return [*scope.leftovers(), *scope.processes()]

    wait_until(lambda: not left(), "the end of all that the driver left", timeout_s=20, seen=left)


def test_a_signal_to_the_drivers_group_does_not_end_the_janitor() -> None:
    """As Ctrl-C in a terminal is: the janitor must survive it to clean up."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, start_new_session=True)
    assert driver.stdout is not None
    run_id, _ = driver.stdout.readline().decode().split()
    scope = RunScope(run_id=run_id)
    os.killpg(driver.pid, signal.SIGTERM)
    driver.wait()
    wait_until(lambda: not scope.leftovers(), "the end of the driver's files", timeout_s=20, seen=scope.leftovers)


MAPPER = """
import mmap, sys, time
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print(flush=True)
time.sleep(300)
"""


def test_shared_memory_of_libraries_goes_too_unless_another_process_uses_it(scope: RunScope) -> None:
    files = [SHM_DIR / f"psm_{scope.run_id}_{name}" for name in ("mapped", "noted", "shared", "foreign")]
    files[1].write_bytes(b"left by a process that has ended")
    ours = [start([sys.executable, "-c", MAPPER, str(f)], scope.run_id) for f in (files[0], files[2])]
    foreign = [start([sys.executable, "-c", MAPPER, str(f)], None) for f in (files[2], files[3])]
    try:
        for process in (*ours, *foreign):
            assert process.stdout is not None
            process.stdout.readline()
        assert scope.mapped_files() == {files[0], files[2]}
        clean_up(scope, noted=[files[1]])
        assert [f.exists() for f in files] == [False, False, True, True]
    finally:
        for process in (*ours, *foreign):
            process.kill()
            process.wait()
        for file in files:
            file.unlink(missing_ok=True)
