"""Find out from the logs of Ray's processes why Ray did not start; its own message mostly says only that it waited."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.host.janitor import SHM_DIR
from megarl.host.temp_dir import MOST_BYTES, RAY_DIRECTORY

# The logs of the processes that Ray starts first.
_LOGS = ("gcs_server.*", "raylet.*")
_TAIL_BYTES = 1 << 16
# Lines of levels below an error.
_NO_ERROR = re.compile(r"\[[^]]* [DIW] ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A reason for which Ray does not start: a pattern of what it or its processes say, and the remedy."""

    signs: str
    remedy: str


# In this order: of several that fit, the first is what the others come from.
CAUSES = (
    Cause(
        signs=r"AF_UNIX path|socket_filename|File ?name too long",
        remedy=f"set TMPDIR to a directory whose path has at most {MOST_BYTES} bytes",
    ),
    Cause(
        signs=r"No space left|ENOSPC|Disk quota|file system .* is over \d+% full",
        remedy=f"free space in {{place}} and {SHM_DIR}, or set TMPDIR to a directory that has some",
    ),
    Cause(signs=r"Too many open files|EMFILE", remedy="raise the limit of open files: ulimit -n 65536"),
    Cause(
        signs=r"Resource temporarily unavailable|can't start new thread|pthread_create|BlockingIOError",
        remedy="raise the limit of processes (ulimit -u, or pids.max of the container), or end other processes",
    ),
    Cause(
        signs=r"Address already in use|EADDRINUSE|port \S+ .*(in use|not available)",
        remedy="another program has a port that Ray wants: end it; an earlier Ray of yours ends by `ray stop`",
    ),
    Cause(
        signs=r"gaierror|Name or service not known|name resolution|getaddrinfo|not known.*host",
        remedy="the name of this host has no address: add it to /etc/hosts",
    ),
    Cause(
        signs=r"[Vv]ersion mismatch|different (Ray|Python) version",
        remedy="the Ray at this address is of another version: install the same Ray and Python on all hosts",
    ),
    Cause(
        signs=r"minimum allowed|object store memory",
        remedy=f"set cluster.object_store_mib to at least 75 and less than is free in {SHM_DIR}; in a container, "
        "enlarge that with --shm-size",
    ),
    Cause(
        signs=r"Failed to connect to Ray cluster|authentication token",
        remedy="if the Ray at this address asks for a token, export RAY_AUTH_MODE=token here, with the RAY_AUTH_TOKEN "
        "or RAY_AUTH_TOKEN_PATH that it was started with; otherwise look into the logs of the hosts",
    ),
    Cause(
        signs=r"Permission denied|EACCES|Read-only file system",
        remedy="let this user write to {place}, or set TMPDIR to a directory of its own",
    ),
    Cause(
        signs=r"Operation not permitted|Network is unreachable|Cannot assign requested address|EPERM",
        remedy="let processes open sockets on this host's own address: a container or sandbox forbids it",
    ),
    # Not "OOM" or "SIGKILL", which Ray lists as what may have been whenever it waited in vain.
    Cause(
        signs=r"exit code:? -9|killed by signal|Cannot allocate memory|bad_alloc|MemoryError",
        remedy="a process of Ray was killed or got no memory: free memory, or raise the limit of the container",
    ),
)
TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
SLOW = "Ray's processes did not come up in time: start again when the machine has less to do, or "
OTHERWISE = (
    f"free CPUs, memory and room in {{place}} and {SHM_DIR}, or lower cluster.object_store_mib, and start the run again"
)


def explain(error: Exception, temp_dir: Path) -> str:
    """Return the remedy for an error of Ray's start; `temp_dir` is the run's, with the logs of what did not start."""
    # The logs of the processes are nearer to the cause than the time-out of whoever waited for them.
    slow = SLOW if TIMED_OUT.search(str(error)) else ""
    remedy = known_remedy(error, _log_lines(temp_dir)) or slow + OTHERWISE
    return remedy.format(place=temp_dir.parent)


def known_remedy(error: Exception, logged: Iterable[str] = ()) -> str | None:
    """Return the remedy for an error, or for what was logged before it; None if neither tells the cause."""
    told = [f"{type(error).__name__}: {error}", *logged]
    return next((cause.remedy for cause in CAUSES if any(re.search(cause.signs, text) for text in told)), None)


def _log_lines(temp_dir: Path) -> Iterator[str]:
    """Yield the last lines that the processes of a Ray logged, without those that are not errors."""
    for pattern in _LOGS:
        for file in sorted((temp_dir / RAY_DIRECTORY / "session_latest" / "logs").glob(pattern)):
            with file.open("rb") as stream:
                stream.seek(max(0, file.stat().st_size - _TAIL_BYTES))
                lines = stream.read().decode("utf-8", errors="replace").splitlines()
            yield from (line for line in lines if not _NO_ERROR.match(line))
