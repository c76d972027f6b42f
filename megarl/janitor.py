"""Leaves nothing behind: one janitor per host ends a run's processes and removes its files when the driver is gone.

Every process of a run inherits MEGARL_RUN_ID. The janitor is started by the driver, in a session of its own, and
reads a pipe that only the driver can write to. When the pipe closes, for whatever reason (clean end, crash,
SIGKILL), it ends every process that carries the run's id and unlinks the run's names. It touches nothing else.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

RUN_ID_VARIABLE = "MEGARL_RUN_ID"
SHM_DIR = Path("/dev/shm")
GRACE_S = 3.0
# Ray's own processes end within seconds of the driver after a clean shutdown; let them.
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScope:
    """The names a run may create outside its run directory. All carry its id."""

    run_id: str

    @property
    def temp_dir(self) -> Path:
        """Ray's session files; short, because socket paths are limited to 107 bytes."""
        return Path(tempfile.gettempdir()) / f"mr-{self.run_id}"

    def shm_file(self, name: str) -> Path:
        """A file in shared memory."""
        return SHM_DIR / f"megarl-{self.run_id}-{name}"

    def leftovers(self) -> list[Path]:
        """Files and directories of this run that exist now."""
        shm = list(SHM_DIR.glob(f"megarl-{self.run_id}-*")) if SHM_DIR.is_dir() else []
        return shm + ([self.temp_dir] if self.temp_dir.exists() else [])

    def processes(self) -> list[int]:
        """Live processes that inherited this run's id, this one excluded."""
        marker = f"{RUN_ID_VARIABLE}={self.run_id}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if marker in (entry / "environ").read_bytes().split(b"\0") and not _is_zombie(entry):
                    found.append(int(entry.name))
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
        return found


def _is_zombie(entry: Path) -> bool:
    return entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"


class Janitor:
    """The driver's end of the pipe. Closing it, or dying, lets the janitor clean up."""

    def __init__(self) -> None:
        self.scope = RunScope(run_id=uuid.uuid4().hex[:8])
        # Set before any child exists, so that all of them inherit it.
        os.environ[RUN_ID_VARIABLE] = self.scope.run_id
        read_end, self._write_end = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.janitor", str(read_end), self.scope.run_id],
            pass_fds=[read_end],
            start_new_session=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        os.close(read_end)

    def close(self) -> None:
        """Let the janitor clean up and wait until it is done."""
        os.close(self._write_end)
        self._process.wait()
        os.environ.pop(RUN_ID_VARIABLE, None)


def clean_up(scope: RunScope) -> None:
    """End the run's processes, then unlink its names. The driver does not carry its own id."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline and scope.processes():
        time.sleep(0.1)
    for signum, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        deadline = time.monotonic() + wait_s
        # Again and again: a process may have forked another one before its own end.
        while (alive := scope.processes()) and time.monotonic() < deadline:
            for pid in alive:
                _signal(pid, signum)
            time.sleep(0.1)
    for path in scope.leftovers():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def main(argv: list[str]) -> None:
    """`python -m megarl.janitor READ_FD RUN_ID`, started by `Janitor`."""
    read_end, run_id = int(argv[0]), argv[1]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    with os.fdopen(read_end, "rb") as pipe:
        pipe.read()
    clean_up(RunScope(run_id=run_id))


if __name__ == "__main__":
    main(sys.argv[1:])
