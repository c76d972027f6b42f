"""A run through the `megarl` command, watched from outside by what Linux says of its processes and files."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.waiting import wait_until

MEGARL = Path(sys.executable).with_name("megarl")
START_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CliRun:
    """A started command and the files that take its output."""

    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that must happen while the command runs."""
        wait_until(condition, what, timeout_s=START_S, seen=self.stderr.read_text, process=self.process)

    def run_id(self) -> str:
        """The id that the janitor was started with."""
        self.wait_until(lambda: bool(self._janitors()), "the janitor")
        return self._janitors()[0].cmdline()[-1]

    def _janitors(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "megarl.host.janitor" in child.cmdline()]

    def pid_of(self, name: str, run_id: str) -> int:
        """The driver, or the last process of the run whose command line starts with `name`."""
        return self.process.pid if name == "driver" else processes(run_id, name=name)[-1]

    def end(self) -> None:
        """End the command if a failed test left it running; the janitor does the rest."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def start(directory: Path, *arguments: str, command: Sequence[str] = (str(MEGARL),)) -> CliRun:
    """Start `megarl`, or a command that runs it, in a directory."""
    # Not a part of the run that the tests themselves may have.
    environment = {key: value for key, value in os.environ.items() if key != "MEGARL_RUN_ID"}
    stdout, stderr = directory / "stdout.txt", directory / "stderr.txt"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen([*command, *arguments], cwd=directory, env=environment, stdout=out, stderr=err)
    return CliRun(process=process, stdout=stdout, stderr=stderr)


def processes(run_id: str, *, name: str = "") -> list[int]:
    """Processes of a run, its janitor among them, whose command line starts with `name`."""
    marker = f"MEGARL_RUN_ID={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or _is_zombie(entry):
                continue
            command = entry.joinpath("cmdline").read_bytes().split(b"\0")
            is_janitor = b"megarl.host.janitor" in command and run_id.encode() in command
            if is_janitor or marker in entry.joinpath("environ").read_bytes().split(b"\0"):
                found += [int(entry.name)] if command[0].decode().startswith(name) else []
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return sorted(found)


def _is_zombie(entry: Path) -> bool:
    return entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z"


def leftovers(run_id: str) -> list[str]:
    """Whatever a run has outside its run directory: processes, shared memory, temporary files."""
    ids = Path(tempfile.gettempdir()).glob("mr-*/run")
    files = [*Path("/dev/shm").glob(f"*{run_id}*"), *(file.parent for file in ids if file.read_text() == run_id)]
    return [f"process {pid}" for pid in processes(run_id)] + [str(file) for file in files]


def run_to_end(directory: Path, *arguments: str) -> str:
    """A command in a process of its own that leaves nothing behind; what it printed."""
    directory.mkdir(exist_ok=True)
    run = start(directory, *arguments)
    try:
        run_id = run.run_id()
        assert run.process.wait(START_S) == 0, run.stderr.read_text()
        assert leftovers(run_id) == []
    finally:
        run.end()
    return run.stdout.read_text()
