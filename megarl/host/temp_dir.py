"""Make the directory of a run's temporary files: a local one that has room for Ray's sockets and is this user's alone.

The path of a socket has at most 107 bytes, most of which Ray's own names take. So the directory that TMPDIR names is
passed over where it does not suit, for the first of the usual ones that does.

Other users may make directories beside the run's, under any name. So the run's has a name that nobody can foresee, is
made anew, and belongs to this user alone; the run's id is in a file in it. Ray's own directory lies below, since Ray
lets everybody write to that.
"""

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megarl.errors import ConfigError
from megarl.host.writing import free_bytes, problem
from megarl_sandbox.places import candidates, loose_place

SOCKET_BYTES = 107
# Ray puts this below its directory; a process id has up to seven digits.
_RAY = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
# The beginning of the name of a run's directory, the directory of Ray in it, and the file in it that has the run's id.
PREFIX, RAY_DIRECTORY, _ID_FILE = "mr-", "r", "run"
# `mkdtemp` adds eight characters to what the name begins with.
_RUN = f"/{PREFIX}12345678/{RAY_DIRECTORY}"
MOST_BYTES = SOCKET_BYTES - len(_RAY) - len(_RUN)
# Ray's logs and the files of its sessions; without any room it does not start, and says so after 47 s.
SMALLEST_MIB = 64
# Variables of Triton, of torch's Inductor and of vLLM, and the directories that they name in `local_caches`.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
ADVICE = f"set TMPDIR to a local directory whose path has at most {MOST_BYTES} bytes, with {SMALLEST_MIB} MiB free"


@dataclass(frozen=True, slots=True, kw_only=True)
class TempChoice:
    """The directory for temporary files, None if none suits, and what is wrong with each that comes before it."""

    root: Path | None
    problems: tuple[str, ...]


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
        raise ConfigError(f"no directory for temporary files suits Ray: {'; '.join(choice.problems)}; {ADVICE}")
    return choice.root


def unsuited(root: Path) -> str | None:
    """Say why Ray cannot have its files in a directory; None if it can."""
    if (length := len(os.fsencode(root))) > MOST_BYTES:
        return f"its path has {length} bytes, of which Ray's sockets leave room for {MOST_BYTES}"
    if (loose := loose_place(root)) is not None:
        return f"another user can replace what lies in {loose}"
    try:
        with (
            tempfile.TemporaryDirectory(dir=root, prefix=PREFIX, ignore_cleanup_errors=True) as directory,
            contextlib.closing(socket.socket(socket.AF_UNIX)) as probe,
        ):
            Path(directory, "file").write_bytes(bytes(1 << 12))
            probe.bind(f"{directory}/socket")
    except OSError as error:
        return problem(error, root) if root.is_dir() else "no such directory"
    if (free := free_bytes(root)) < SMALLEST_MIB << 20:
        return f"{free / 2**20:.0f} MiB are free, {SMALLEST_MIB} are needed"
    return None


def make_temp_dir(run_id: str) -> Path:
    """Make the directory of a run's temporary files. Raises ConfigError if there is no place for it."""
    directory = Path(tempfile.mkdtemp(dir=temp_root(), prefix=PREFIX))
    (directory / _ID_FILE).write_text(run_id, encoding="utf-8")
    return directory


def is_private(directory: Path) -> bool:
    """Return whether this is a directory, and no link, that belongs to this user and that nobody else can enter."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def local_caches() -> dict[str, str]:
    """Return where libraries keep compiled kernels, by variable: below the home directory, nodes would share them.

    The directory lasts; another user's of that name, who could put kernels there, is never used.
    """
    with contextlib.suppress(ConfigError, OSError):
        directory = temp_root() / f"megarl-cache-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        if is_private(directory):
            return {name: str(directory / cache) for name, cache in _CACHES.items()}
    return {}


def temp_dirs() -> Iterator[tuple[str, Path]]:
    """Yield the id and the directory of each run of this user that has one on this host, in any of `candidates`.

    Another process may have found another place for its run's.
    """
    for root in candidates():
        for directory in root.glob(f"{PREFIX}*"):
            # Directories of others are not even looked into.
            if is_private(directory):
                with contextlib.suppress(FileNotFoundError):
                    yield (directory / _ID_FILE).read_text(encoding="utf-8"), directory
