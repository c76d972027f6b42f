"""Clean up after a run: one janitor process per host ends the run's processes and removes its files.

Every process of a run inherits MEGARL_RUN_ID. The janitor's owner (the driver, or, in a run on several hosts, the
process that keeps Ray on each) starts it in a session of its own. The janitor reads a pipe that only the owner can
write to. When the pipe closes, for whatever reason (clean end, crash, SIGKILL), the janitor ends every process that
carries the run's id and unlinks the run's files. It touches nothing else.

Libraries (vLLM's workers, multiprocessing) create shared memory under other names. While it waits, the janitor notes
which shared memory the run's processes have mapped. It unlinks these files too, once no process maps them any more.
Docker's containers, which are no processes of the run, it removes by the names that sandboxes have left. While the run
goes on, it ends and removes the programs, containers and directories of samples whose environment worker has died.
It reads /proc itself: psutil takes three times as long to look at the environment of every process.
"""

import contextlib
import os
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.host.child_environment import python_module
from megarl.host.temp_dir import make_temp_dir, temp_dirs

RUN_ID_VARIABLE = "MEGARL_RUN_ID"
# Set for a driver whose hosts have janitors already: the id of the run that they look after.
HOSTED_RUN_VARIABLE = "MEGARL_HOSTED_RUN"
OWNER_VARIABLE = "MEGARL_OWNER"
SHM_DIR = Path("/dev/shm")
_NAME_BYTES = 16
# The beginning of the name of a sample's directory, before the process that made it, and the directory in it whose
# files are named as its Docker containers. The programs of the sample cannot write there.
SANDBOX, CONTAINERS = "megarl-work-", "containers"
REMOVAL_S = 60.0
GRACE_S = 3.0
# Ray's own processes end within seconds of the driver after a clean shutdown; let them.
SETTLE_S = 1.0
WATCH_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScope:
    """Everything on this host that belongs to one run, by the run's id: its processes, and its files outside the run
    directory.
    """

    run_id: str

    def temp_dirs(self) -> list[Path]:
        """List the run's directories of temporary files on this host: one while it works here, else none."""
        return [directory for run_id, directory in temp_dirs() if run_id == self.run_id]

    def new_shm_file(self, name: str) -> Path:
        """Return a path for a shared-memory file of this run, which no other user can guess and take beforehand."""
        return SHM_DIR / f"megarl-{self.run_id}-{name}-{secrets.token_hex(_NAME_BYTES)}"

    def leftovers(self) -> list[Path]:
        """List the files and directories of this run that exist now, none of which another user has put there."""
        shm = [file for file in SHM_DIR.glob(f"megarl-{self.run_id}-*") if _is_own_shm(file)]
        return shm + self.temp_dirs()

    def processes(self) -> list[int]:
        """List the live processes that inherited this run's id, except this one."""
        marker = f"{RUN_ID_VARIABLE}={self.run_id}".encode()
        found = []
        for pid in _all_processes():
            entry = Path(f"/proc/{pid}")
            try:
                if (
                    pid != os.getpid()
                    and marker in (entry / "environ").read_bytes().split(b"\0")
                    # A zombie counts as ended.
                    and (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
                    != "Z"
                ):
                    found.append(pid)
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
        return found

    def mapped_files(self) -> set[Path]:
        """Find the shared-memory files that the run's processes have mapped, whatever their names."""
        return {file for pid in self.processes() for file in mapped_files(pid)}


def _is_own_shm(file: Path) -> bool:
    """Return whether this is shared memory that this user has made, as only such is ever unlinked."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        return False
    return file.parent == SHM_DIR and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def mapped_files(pid: int) -> set[Path]:
    """Find the existing shared-memory files that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return set()
    start = f" {SHM_DIR}/"
    return {Path(line[line.index(start) + 1 :]) for line in lines if start in line and not line.endswith(" (deleted)")}


class HostedRun:
    """The counterpart of `Janitor` for a driver whose hosts already have janitors, which outlive the driver."""

    # Each host's janitor makes one.
    temp_dir: Path | None = None

    def __init__(self, run_id: str) -> None:
        self.scope = RunScope(run_id=run_id)
        os.environ[RUN_ID_VARIABLE] = run_id

    def close(self) -> None:
        """Remove the run's id from the environment; the host's janitor cleans up later."""
        os.environ.pop(RUN_ID_VARIABLE, None)


class Janitor:
    """The owner's handle to a janitor process, which cleans up after the run when the owner calls `close` or dies.

    `temp_dir`: the directory of the run's temporary files on this host, which this has made. Raises ConfigError if
    there is no place for it.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self.scope = RunScope(run_id=run_id or uuid.uuid4().hex[:8])
        self.temp_dir = make_temp_dir(self.scope.run_id)
        # The id is set before any child exists, so that every child inherits it.
        os.environ[RUN_ID_VARIABLE] = self.scope.run_id
        read_end, self._write_end = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        self._process = subprocess.Popen(
            [*python_module("megarl.host.janitor"), str(read_end), self.scope.run_id, str(self.temp_dir)],
            pass_fds=[read_end],
            start_new_session=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        os.close(read_end)

    def close(self) -> None:
        """Make the janitor clean up, and wait until it is done."""
        os.close(self._write_end)
        self._process.wait()
        os.environ.pop(RUN_ID_VARIABLE, None)


def scopes_of(prefix: str) -> list[RunScope]:
    """Find the runs whose ids begin with `prefix` and whose temporary directories are on this host."""
    return [RunScope(run_id=run_id) for run_id, _ in temp_dirs() if run_id.startswith(prefix)]


def clean_up(scope: RunScope, noted: Iterable[Path] = ()) -> None:
    """End the run's processes; then delete its files, and the files `noted`, which are shared memory made by
    libraries.

    The owner itself is not ended, since it was started without the run's id in its environment.
    """
    libraries = {*noted, *scope.mapped_files()}
    end_processes(scope, settle_s=SETTLE_S, grace_s=GRACE_S)
    _remove_containers(sandbox for each in scope.temp_dirs() for sandbox in each.glob(f"{SANDBOX}*"))
    for path in scope.leftovers():
        if path.is_dir():
            # It works by descriptors, and so follows no links.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    in_use = {file for pid in _all_processes() for file in mapped_files(pid)} if libraries else set()
    for path in filter(_is_own_shm, libraries - in_use):
        path.unlink(missing_ok=True)


def program_variables() -> dict[str, str]:
    """Return the variables by which the janitor knows a program of this process."""
    run_id = os.environ.get(RUN_ID_VARIABLE)
    return {} if run_id is None else {RUN_ID_VARIABLE: run_id, OWNER_VARIABLE: str(os.getpid())}


def new_sandbox() -> Path:
    """Make the directory of a sample of this process."""
    return Path(tempfile.mkdtemp(prefix=f"{SANDBOX}{os.getpid()}-"))


def remove_orphans(scope: RunScope, temp_dir: Path, *, removed: Collection[Path] = ()) -> set[Path]:
    """End programs whose owners have died, and remove the samples' directories in `temp_dir` whose makers have, with
    their containers, except those that were `removed`; return these directories.
    """
    programs, sandboxes = scope.processes(), {*temp_dir.glob(f"{SANDBOX}*")} - {*removed}
    # Listed last, it has the owners of all that were found.
    alive = {str(pid) for pid in _all_processes()}
    for pid in programs:
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            found = dict(each.partition(b"=")[::2] for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            if found.get(OWNER_VARIABLE.encode(), b"").decode() not in {"", *alive}:
                os.killpg(os.getpgid(pid), signal.SIGKILL)
    sandboxes = {each for each in sandboxes if each.name.split("-")[2] not in alive}
    _remove_containers(sandboxes)
    for each in sandboxes:
        shutil.rmtree(each, ignore_errors=True)
    return sandboxes


def _remove_containers(sandboxes: Iterable[Path]) -> None:
    if names := [file.name for each in sandboxes for file in (each / CONTAINERS).glob("*")]:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["docker", "rm", "--force", *names], check=False, capture_output=True, timeout=REMOVAL_S)


def end_processes(scope: RunScope, *, settle_s: float, grace_s: float) -> None:
    """Wait up to `settle_s` for the run's processes to end, then up to `grace_s` after SIGTERM; SIGKILL the rest."""
    deadline = time.monotonic() + settle_s
    while time.monotonic() < deadline and scope.processes():
        time.sleep(0.1)
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, GRACE_S)):
        deadline = time.monotonic() + wait_s
        # Repeat, because a process may have forked another one before it ended.
        while (alive := scope.processes()) and time.monotonic() < deadline:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            time.sleep(0.1)


def _all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def main(argv: list[str]) -> None:
    """Watch the owner's pipe, then clean up. `Janitor` starts this as READ_FD RUN_ID TEMP_DIR."""
    read_end, run_id, temp_dir = int(argv[0]), argv[1], Path(argv[2])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    scope, noted, removed = RunScope(run_id=run_id), set[Path](), set[Path]()
    # Nothing is ever written: the pipe becomes readable when the owner's end closes.
    # Not `select`, which refuses the descriptors above 1023 that a busy owner passes on.
    owner = select.poll()
    owner.register(read_end, select.POLLIN)
    while not owner.poll(WATCH_S * 1000):
        noted |= scope.mapped_files()
        removed |= remove_orphans(scope, temp_dir, removed=removed)
    clean_up(scope, noted)


if __name__ == "__main__":
    main(sys.argv[1:])
