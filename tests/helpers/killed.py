"""Kill a run's driver, and see what it was executing and what stays of it."""

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.host.janitor import RunScope

# Longer than the janitor gives processes to end.
GONE_WITHIN_S = 30.0
RAY_TITLE = "ray::"


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A run that was killed.

    executing: the methods that its Ray actors, or their forks, were in. leftovers: processes and files outside its
    directory that were still there `gone_s` seconds later.
    """

    executing: tuple[str, ...]
    leftovers: tuple[str, ...]
    gone_s: float


def kill(driver: subprocess.Popen[bytes]) -> Killed:
    """SIGKILL the driver, and wait until nothing of its run is left, or for `GONE_WITHIN_S`."""
    # Stopped while it is looked at, so that what is seen is what is killed.
    driver.send_signal(signal.SIGSTOP)
    family = psutil.Process(driver.pid).children(recursive=True)
    executing = _executing(family)
    janitor = next((process for process in family if "megarl.host.janitor" in command_of(process)), None)
    scope = RunScope(run_id=command_of(janitor)[-1]) if janitor else None
    mapped = scope.mapped_files() if scope else set()
    driver.kill()
    driver.wait()
    began = time.monotonic()
    while (left := _leftovers(family, scope, mapped)) and time.monotonic() - began < GONE_WITHIN_S:
        time.sleep(0.05)
    return Killed(executing=executing, leftovers=tuple(left), gone_s=time.monotonic() - began)


def _executing(family: Sequence[psutil.Process]) -> tuple[str, ...]:
    """Ray shows an actor's method in the title of its process; what the actor forks has that title too."""
    titles = {process.pid: command_of(process)[0] for process in family}
    found = set()
    for process in family:
        title = titles[process.pid]
        if title.startswith(RAY_TITLE) and "." in title:
            forked = titles.get(_parent_pid(process), "").startswith(RAY_TITLE)
            found.add(f"{'a fork of ' if forked else ''}{title.removeprefix(RAY_TITLE)}")
    return tuple(sorted(found))


def _leftovers(family: Sequence[psutil.Process], scope: RunScope | None, mapped: set[Path]) -> list[str]:
    pids = {process.pid for process in family if command_of(process) != [""]}
    files = {path for path in mapped if path.exists()}
    if scope is not None:
        # Also what was started since the driver was looked at.
        pids |= set(scope.processes())
        files |= set(scope.leftovers())
    return [f"process {pid}" for pid in sorted(pids)] + [str(path) for path in sorted(files)]


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; [""] for one that has ended."""
    try:
        return process.cmdline() or [""]
    except psutil.NoSuchProcess:
        return [""]


def _parent_pid(process: psutil.Process) -> int:
    """Its parent; 0 for one that has ended."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0
