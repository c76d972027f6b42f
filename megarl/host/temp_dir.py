"""Choose the directory of a run's temporary files: a local one in which Ray can make its sockets.

The path of a socket has at most 107 bytes, most of which Ray's own names take. So the directory that TMPDIR names is
passed over where it does not suit, for the first of the usual ones that does.
"""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megarl.errors import ConfigError
from megarl.storage.writing import problem

SOCKET_BYTES = 107
# What Ray puts below its directory; a process id has up to seven digits.
_RAY = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
# A run's directory, with the id of a restarted Slurm job, and a directory in it.
_RUN = "/mr-12345678-1-1/r"
MOST_BYTES = SOCKET_BYTES - len(_RAY) - len(_RUN)
# Ray's logs and the files of its sessions; without any room it does not start, and says so after 47 s.
SMALLEST_MIB = 64
USUAL = (Path("/tmp"), Path("/var/tmp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TempChoice:
    """The directory for temporary files, None if none suits, and what is wrong with each that comes before it."""

    root: Path | None
    problems: tuple[str, ...]

    @property
    def advice(self) -> str:
        return (
            f"set TMPDIR to a local directory whose path has at most {MOST_BYTES} bytes, with {SMALLEST_MIB} MiB free"
        )


def candidates() -> tuple[Path, ...]:
    """Return the directories that a run's temporary directory may lie in, the preferred one first."""
    given = [Path(os.path.abspath(os.environ["TMPDIR"]))] if os.environ.get("TMPDIR") else []
    return tuple(dict.fromkeys([*given, *USUAL]))


def choose_temp_root() -> TempChoice:
    """Find the first of `candidates` that suits. A process asks each once, so that what it chose stays chosen."""
    return _choose(candidates())


@cache
def _choose(roots: tuple[Path, ...]) -> TempChoice:
    problems: list[str] = []
    for root in roots:
        if (found := unsuited(root)) is None:
            return TempChoice(root=root, problems=tuple(problems))
        problems.append(f"{root}: {found}")
    return TempChoice(root=None, problems=tuple(problems))


def temp_root() -> Path:
    """Return the directory that a run's temporary directory lies in. Raises ConfigError if none suits."""
    choice = choose_temp_root()
    if choice.root is None:
        raise ConfigError(f"no directory for temporary files suits Ray: {'; '.join(choice.problems)}; {choice.advice}")
    return choice.root


def unsuited(root: Path) -> str | None:
    """Say why Ray cannot have its files in a directory; None if it can."""
    if (length := len(os.fsencode(root))) > MOST_BYTES:
        return f"its path has {length} bytes, of which Ray's sockets leave room for {MOST_BYTES}"
    try:
        with _probe(root) as directory, contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            (directory / "file").write_bytes(bytes(1 << 12))
            probe.bind(str(directory / "socket"))
    except OSError as error:
        return problem(error, root) if root.is_dir() else "no such directory"
    if (free := shutil.disk_usage(root).free) < SMALLEST_MIB << 20:
        return f"{free / 2**20:.0f} MiB are free, {SMALLEST_MIB} are needed"
    return None


@contextlib.contextmanager
def _probe(root: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir=root, prefix="mr-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
