"""One process owns a directory: who is refused, who takes over, and what an owner notices that was taken for dead."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megarl.errors import ConfigError, RunError, WorkerError
from megarl.host import directory_lock
from megarl.host.directory_lock import LOST_S, DirectoryLock, Owner, has_died, read_claims
from tests.helpers.waiting import wait_until

# A program that owns the directory in its arguments and says so, until its input ends.
OWN = """
import sys
from pathlib import Path
from megarl.host.directory_lock import DirectoryLock
from megarl.host.exit_codes import exit_on_errors
with exit_on_errors(), DirectoryLock(Path(sys.argv[1]), "train"):
    print("owns", flush=True)
    sys.stdin.readline()
    Path(sys.argv[1], "written").touch()
"""


@contextmanager
def owning(directory: Path, *, program: str = OWN) -> Iterator[subprocess.Popen[str]]:
    """A process that owns a directory; none is left behind."""
    command = [sys.executable, "-c", program, str(directory)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "owns\n"
            yield process
        finally:
            process.kill()


def claim(directory: Path, owner: Owner, *, silent_s: float = 0.0, number: int = 1) -> Path:
    """The claim of a process that last gave a sign of life so many seconds ago."""
    file = directory / "lock" / f"{number:06d}" / f"{owner.token}.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(asdict(owner)))
    os.utime(file, (time.time() - silent_s,) * 2)
    return file


def elsewhere(**changed: object) -> Owner:
    """A process of another host."""
    return replace(Owner.this_process("sft"), host="node7", boot="other", pid=4242, **changed)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost lock would interrupt this process; those that are tests' own processes give their signs of life."""
    monkeypatch.setattr(directory_lock, "BEAT_S", 1000.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts are watched for a fraction of a second."""
    monkeypatch.setattr(directory_lock, "CONFIRM_S", 0.2)
    monkeypatch.setattr(directory_lock, "LOOK_S", 0.02)


def test_the_second_is_told_who_owns_it_and_changes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with owning(run) as first:
        before = sorted(run.rglob("*"))
        with pytest.raises(ConfigError) as caught, DirectoryLock(run, "sft"):
            pass
        said = (
            rf"run: is in use by megarl train on \S+ \(process {first.pid}, since 2\d{{3}}-.*\).*`kill {first.pid}` on"
        )
        assert re.search(said, str(caught.value))
        assert sorted(run.rglob("*")) == before
        # Looking on one host needs no waiting: nothing was printed.
        first.communicate("\n")
        assert first.returncode == 0
    assert [path.name for path in run.iterdir()] == ["written"]
    with DirectoryLock(run, "sft"):
        pass


def test_nothing_is_left_of_an_owner_that_wrote_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a mistake"), DirectoryLock(tmp_path / "runs" / "a", "train"):
        raise ConfigError("a mistake")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with DirectoryLock(tmp_path / "mine", "train"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_suspended_process_of_this_host_lives(tmp_path: Path) -> None:
    with owning(tmp_path) as first:
        first.send_signal(signal.SIGSTOP)
        os.utime(read_claims(tmp_path / "lock")[0].file, (1.0, 1.0))
        with pytest.raises(ConfigError, match=f"process {first.pid}"), DirectoryLock(tmp_path, "sft"):
            pass


def test_a_killed_process_is_followed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with owning(tmp_path) as first:
        assert not has_died(tmp_path / "lock")
        first.kill()
        first.wait()
        assert has_died(tmp_path / "lock")
    with DirectoryLock(tmp_path, "sft") as lock:
        lock.require()
        (left,) = read_claims(tmp_path / "lock")
        assert left.owner is not None
        assert (left.owner.command, left.owner.pid) == ("sft", os.getpid())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path}: taken over from megarl train on ")
    assert not has_died(tmp_path / "lock")


def test_a_zombie_has_ended(tmp_path: Path) -> None:
    with owning(tmp_path) as first:
        os.kill(first.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        with DirectoryLock(tmp_path, "sft"):
            pass


def test_a_later_process_of_the_same_pid_is_another(tmp_path: Path) -> None:
    me = Owner.this_process("train")
    assert me.started is not None
    assert me.is_alive(seen_by=me)
    claim(tmp_path, replace(me, token="before", started=me.started - 1))
    with DirectoryLock(tmp_path, "train"):
        pass


@pytest.mark.parametrize("apart", [{"host": "node7"}, {"boot": "another"}, {"namespace": "pid:[7]"}])
def test_a_pid_says_nothing_of_another_machine_boot_or_container(apart: dict[str, str]) -> None:
    me = Owner.this_process("train")
    assert replace(me, pid=2**22 + 1).is_alive(seen_by=me) is False
    assert replace(me, pid=2**22 + 1, **apart).is_alive(seen_by=me) is None  # type: ignore[arg-type]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_another_host_that_gives_signs_of_life_is_believed_whatever_its_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    file = claim(tmp_path, elsewhere(job="17"), silent_s=skew_s)
    sleep, beats = time.sleep, iter(range(1, 100))

    def beat(seconds: float) -> None:
        sleep(seconds)
        os.utime(file, (time.time() - skew_s + next(beats),) * 2)

    monkeypatch.setattr(directory_lock.time, "sleep", beat)
    said = r"in use by megarl sft on node7 \(process 4242, Slurm job 17, .*`scancel 17` on node7"
    with pytest.raises(ConfigError, match=said), DirectoryLock(tmp_path, "sft"):
        pass
    assert file.exists()


@pytest.mark.usefixtures("quick")
def test_another_host_that_has_been_silent_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = claim(tmp_path, elsewhere(), silent_s=LOST_S + 1)
    with DirectoryLock(tmp_path, "sft"):
        assert not file.exists()
    waits, took = capsys.readouterr().out.splitlines()
    assert "waiting up to 30 s for a sign of life" in waits
    assert "taken over from megarl sft on node7 (process 4242" in took


@pytest.mark.usefixtures("quick")
def test_another_host_is_watched_until_it_has_been_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last sign, just now by a clock that is an hour ahead, is old only by what passes here."""
    claim(tmp_path, elsewhere(), silent_s=-3600.0)
    now, sleep = [0.0], time.sleep

    def pass_time(seconds: float) -> None:
        # Threads of earlier tests may sleep, too.
        if threading.current_thread() is threading.main_thread():
            now[0] += 1.0
        else:
            sleep(seconds)

    monkeypatch.setattr(directory_lock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(directory_lock.time, "sleep", pass_time)
    with DirectoryLock(tmp_path, "sft"):
        assert now[0] == LOST_S


@pytest.mark.usefixtures("quick")
def test_an_owner_whose_file_a_crash_has_spoilt_is_followed_once_it_is_silent(tmp_path: Path) -> None:
    for number, content in enumerate(("", "\0\0\0", '{"token": "x"}', "[]"), start=1):
        file = claim(tmp_path, elsewhere(token=f"{number}"), number=number)
        file.write_text(content)
        os.utime(file, (1.0, 1.0))
    with DirectoryLock(tmp_path, "sft") as lock:
        lock.require()
        assert len(read_claims(tmp_path / "lock")) == 1


@pytest.mark.parametrize(
    ("before", "now", "follows"),
    [
        # Put back into the queue, on another host; a job may have been requeued more than once.
        (("17", None), ("17", "1"), True),
        (("17", "1"), ("17", "3"), True),
        # Two commands of one job, and two jobs.
        (("17", None), ("17", None), False),
        (("17", None), ("18", "1"), False),
        ((None, None), ("17", "1"), False),
    ],
)
def test_a_requeue_of_the_same_job_follows_at_once(
    before: tuple[str | None, str | None],
    now: tuple[str, str | None],
    follows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def owner(job: str | None, restart: str | None) -> Owner:
        for name, value in (("SLURM_JOB_ID", job), ("SLURM_RESTART_COUNT", restart)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        return Owner.this_process("train")

    first = replace(owner(*before), host="node7")
    assert first.is_alive(seen_by=owner(*now)) is (False if follows else None)


def test_jobs_of_two_clusters_may_have_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "east")
    first = replace(Owner.this_process("train"), host="node7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "west")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert first.is_alive(seen_by=Owner.this_process("train")) is None


@pytest.mark.parametrize("left", [False, True])
def test_of_many_at_the_same_instant_one_wins(tmp_path: Path, left: bool) -> None:
    """Three processes, over a free directory and over one that a dead process has left."""
    run, go = tmp_path / "run", tmp_path / "go"
    run.mkdir()
    if left:
        claim(run, replace(Owner.this_process("train"), pid=2**22 + 1, token="dead"))
    wait = "import time, os\nwhile not os.path.exists(sys.argv[2]): pass\n"
    program = OWN.replace("with exit", wait + "with exit")
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(run), str(go)], stdin=pipe, stdout=pipe, stderr=pipe)
        for _ in range(3)
    ]
    try:
        time.sleep(0.5)
        go.touch()
        # The owner waits for its input, so those that end were refused.
        wait_until(lambda: sum(process.poll() is None for process in started) <= 1, "two refusals")
        (winner,) = (process for process in started if process.poll() is None)
        assert {process.returncode for process in started if process is not winner} == {2}
        assert winner.communicate(b"\n")[0].endswith(b"owns\n")
        assert winner.returncode == 0
        assert [path.name for path in run.iterdir()] == ["written"]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("later", ["others took over", "another owns it", "another number", "free, then owned"])
def test_what_was_seen_before_a_pause_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """A process sees that the owner has died, is paused, and goes on after others have come and gone."""
    dead = replace(Owner.this_process("train"), pid=2**22 + 1, token="dead")
    alive = replace(Owner.this_process("train"), token="alive")
    is_free = later == "free, then owned"
    if not is_free:
        claim(tmp_path, dead)
    find, looks = DirectoryLock.require_free, []

    def paused(self: DirectoryLock) -> object:
        looks.append(self)
        found = find(self)
        if len(looks) == 1:
            if not is_free:
                (tmp_path / "lock" / "000001" / "dead.json").unlink()
                (tmp_path / "lock" / "000001").rmdir()
            if later != "others took over":
                claim(tmp_path, alive, number={"another owns it": 1, "another number": 2, "free, then owned": 2}[later])
        return found

    monkeypatch.setattr(DirectoryLock, "require_free", paused)
    lock = DirectoryLock(tmp_path, "sft")
    if later == "others took over":
        with lock:
            lock.require()
    else:
        with pytest.raises(ConfigError, match="is in use by"):
            lock.__enter__()
        assert [each.owner for each in read_claims(tmp_path / "lock")] == [alive]
    assert len(looks) == 2


def message_of_loss(directory: Path, lose: Callable[[Path], None]) -> str:
    """What an owner is told before it writes, and when it ends, after its claim `lose(file)` was lost."""
    lock = DirectoryLock(directory, "train")
    lock.__enter__()
    assert lock.is_owned()
    lose(read_claims(directory / "lock")[0].file)
    assert not lock.is_owned()
    with pytest.raises(RunError) as before_writing:
        lock.require()
    with pytest.raises(RunError) as at_the_end:
        lock.__exit__(SystemExit, SystemExit(130), None)
    assert str(at_the_end.value) == str(before_writing.value)
    return str(before_writing.value)


def test_an_owner_that_was_taken_for_dead_writes_nothing_more(tmp_path: Path) -> None:
    def take_over(file: Path) -> None:
        claim(tmp_path, elsewhere(), number=2)
        file.unlink()

    said = r"was taken over by megarl sft on node7 .* while this one \(megarl train on .*writes nothing more"
    assert re.search(said, message_of_loss(tmp_path, take_over))
    assert [claim.number for claim in read_claims(tmp_path / "lock")] == [2]


def test_an_owner_that_is_followed_by_one_of_its_own_number_notices(tmp_path: Path) -> None:
    def take_over(file: Path) -> None:
        file.unlink()
        file.parent.rmdir()
        claim(tmp_path, elsewhere())

    assert "megarl sft on node7" in message_of_loss(tmp_path, take_over)
    assert len(read_claims(tmp_path / "lock")) == 1


def test_an_owner_whose_directory_was_removed_notices(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert f"{run / 'lock'} was removed" in message_of_loss(run, lambda _: shutil.rmtree(run))
    assert not run.exists()


def test_another_error_is_not_hidden_by_the_loss(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path, "train")
    lock.__enter__()
    read_claims(tmp_path / "lock")[0].file.unlink()
    # It returns, so the error goes on.
    lock.__exit__(WorkerError, WorkerError("a rank died"), None)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_claim_that_its_owner_gives_back_meanwhile_is_none(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS, a file that is listed and then removed on another host may be known by its old handle only."""
    with DirectoryLock(tmp_path, "sft"):
        [claim] = read_claims(tmp_path / "lock")
        read = Path.read_text

        def read_text(path: Path, encoding: str) -> str:
            if path == claim.file:
                raise OSError(code, os.strerror(code))
            return read(path, encoding)

        monkeypatch.setattr(Path, "read_text", read_text)
        assert read_claims(tmp_path / "lock") == []


def test_errors_of_storage_that_may_pass_are_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with DirectoryLock(tmp_path, "train") as lock, monkeypatch.context() as patch:
        patch.setattr(directory_lock.os, "utime", fail)
        assert lock.is_owned()


def test_a_woken_process_leaves_by_itself_and_says_why(tmp_path: Path) -> None:
    """It waits for its input, as a driver waits for its ranks."""
    with owning(tmp_path) as first:
        first.send_signal(signal.SIGSTOP)
        (left,) = read_claims(tmp_path / "lock")
        left.file.unlink()
        first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=30) == 1
        errors = first.stderr.read() if first.stderr else ""
        assert errors.startswith(f"error: {tmp_path}: is no longer this process's: ")
        assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_gives_it_back(tmp_path: Path, signum: signal.Signals) -> None:
    with owning(tmp_path / "run") as first:
        first.send_signal(signum)
        assert first.wait(timeout=30) == 128 + signum
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"run: cannot make .*/run/lock: Not a directory"):
        DirectoryLock(tmp_path / "run", "train").__enter__()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(ConfigError, match="nobody owns it, and yet no claim can be made there; remove it"):
        DirectoryLock(tmp_path / "other", "train").__enter__()
