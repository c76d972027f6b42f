"""Own a directory: one process at a time writes it, on whatever host; the next takes over from one that has died.

PLACE, such as RUN/lock, holds a *claim* per owner: a directory 000001 with the file TOKEN.json, which describes the
owner, and whose time of modification is its last sign of life. A claim appears complete, because a directory of
another name is renamed to it, which fails if the name is taken: one operation of the file system, also on shared
storage, where locks of files (flock, and so filelock's) may be those of one host only.

A process takes over by making the claim after that of an owner that has died, and then removing the latter. If several
try at once, one can make it. An owner whose claim is gone, because it was taken for dead while it was suspended,
notices at its next sign of life, and before everything that it writes (`require`).
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Self

from megarl.errors import ConfigError, RunError
from megarl.host.streams import print_lines
from megarl.host.writing import problem

PLACE = "lock"
BEAT_S = 2.0
# A process on another host that has given no sign of life for this long is held for dead.
LOST_S = 30.0
# The clocks of two hosts may differ, so even an owner that seems lost is watched for some beats.
CONFIRM_S = 10.0
LOOK_S = 0.5
_MAX_TRIES = 100
_DIGITS = 6
# The errors of a storage for a file that another process has removed; NFS may know it by its old handle only.
_GONE = (errno.ENOENT, errno.ESTALE)
# Errors of a rename by which it says that another process was faster.
_TAKEN = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that owns a directory, as it describes itself.

    boot, namespace: of what its pid is a number. started: when it was started, in clock ticks since the boot; it tells
    the process from a later one of the same pid. job, restart: its Slurm job, and how often that had been put back into
    the queue. since: in seconds since 1970.
    """

    token: str
    command: str
    host: str
    pid: int
    boot: str
    namespace: str
    started: int | None
    job: str | None
    restart: int
    since: float

    @classmethod
    def this_process(cls, command: str) -> Self:
        """Describe this process, which runs a command of megarl."""
        token, pid, job = uuid.uuid4().hex, os.getpid(), os.environ.get("SLURM_JOB_ID")
        cluster = os.environ.get("SLURM_CLUSTER_NAME")
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            # Then no other process can tell by the pid whether this one lives.
            boot = namespace = token
        return cls(
            token=token,
            command=command,
            host=socket.gethostname(),
            pid=pid,
            boot=boot,
            namespace=namespace,
            started=_ticks_at_start(pid),
            job=job if job is None or cluster is None else f"{job} of {cluster}",
            restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            since=time.time(),
        )

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"megarl {self.command} on {self.host} (process {self.pid}{job}, since {since})"

    def is_alive(self, *, seen_by: "Owner") -> bool | None:
        """Return whether this process lives, as far as another one can tell at once; None if only time can tell."""
        if self.job is not None and self.job == seen_by.job and self.restart < seen_by.restart:
            # Slurm ends a job before it starts it again.
            return False
        if (self.host, self.boot, self.namespace) != (seen_by.host, seen_by.boot, seen_by.namespace):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            # It is that of another user, whose processes this one may not see (hidepid).
            return None if (started := _ticks_at_start(self.pid)) is None else started == self.started
        return _ticks_at_start(self.pid) == self.started


def _ticks_at_start(pid: int) -> int | None:
    """Return when a process of this host was started, in clock ticks since the boot; None if it has ended."""
    try:
        # The name of the program, in parentheses, may hold spaces.
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])


class Claim(NamedTuple):
    """A claim to a directory, and its owner; None if a crash of the machine has spoilt its file."""

    number: int
    file: Path
    owner: Owner | None

    def last_sign(self) -> float | None:
        """Return when the owner last gave a sign of life, in seconds since 1970; None if the claim is gone."""
        try:
            # Over NFS, opening a file asks the server for its present times.
            with self.file.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime
        except OSError:
            return None


def read_claims(place: Path) -> list[Claim]:
    """List the claims in a place, the one that counts last."""
    claims = []
    for file in place.glob(f"{'[0-9]' * _DIGITS}/*.json"):
        try:
            owner = Owner(**json.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            continue
        except (ValueError, TypeError):
            owner = None
        claims.append(Claim(int(file.parent.name), file, owner))
    return sorted(claims, key=lambda claim: claim.number)


def has_died(place: Path) -> bool:
    """Return whether the owner of a place is known to have ended without giving it back."""
    me = Owner.this_process("status")
    return any(c.owner is not None and c.owner.is_alive(seen_by=me) is False for c in read_claims(place)[-1:])


class DirectoryLock:
    """The ownership of a directory within this context. Nothing is left of it afterwards, no empty directory either.

    Raises:
        ConfigError: on entry, if another process owns the directory; the message says which, and how to go on.
        RunError: on exit, if another process has taken the directory over meanwhile.
    """

    def __init__(self, directory: Path, command: str, *, place: Path | None = None) -> None:
        """Prepare to own a directory for a command of megarl. place: where claims lie; None: in the directory."""
        self.directory, self._place = directory, place or directory / PLACE
        self._me = Owner.this_process(command)
        self._file: Path | None = None
        # The directories that were not there before, the deepest first.
        self._made: list[Path] = []
        self._is_lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        try:
            self._made = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
            if not any(self._claim_after(self.require_free()) for _ in range(_MAX_TRIES)):
                why = "nobody owns it, and yet no claim can be made there; remove it"
                if not self.directory.is_dir():
                    why = "no directory can be made there; choose another one (run.dir)"
                raise ConfigError(f"{self._place}: {why}")
        except OSError as error:
            raise ConfigError(f"{self.directory}: cannot make {self._place}: {problem(error, self._place)}") from error
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        try:
            if kind is None or kind in (SystemExit, KeyboardInterrupt):
                self.require()
        finally:
            assert self._file is not None
            with contextlib.suppress(OSError):
                self._file.unlink()
            for path in (*self._place.glob("*"), self._place, *self._made):
                # Only one that is empty can be removed.
                with contextlib.suppress(OSError):
                    path.rmdir()

    def is_owned(self) -> bool:
        """Give a sign of life, and return whether this process still owns the directory."""
        if self._file is None or self._is_lost:
            return False
        try:
            os.utime(self._file)
        except OSError as error:
            # Other errors of a shared storage may pass.
            self._is_lost = error.errno in _GONE
        return not self._is_lost

    def require(self) -> None:
        """Raise RunError if this process no longer owns the directory; call it before writing there."""
        if self.is_owned():
            return
        owner = next((claim.owner for claim in reversed(read_claims(self._place))), None)
        taken = f"was taken over by {owner}" if owner else f"is no longer this process's: {self._place} was removed"
        raise RunError(
            f"{self.directory}: {taken} while this one ({self._me}) was suspended or cut off; it writes nothing more "
            f"there and ends; leave the directory to the other, or start this command again when that has ended"
        )

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            if not self.is_owned() and not self._ended.is_set():
                # The main thread may wait for long; this makes it leave, and `__exit__` says why.
                os.kill(os.getpid(), signal.SIGINT)
                return

    def require_free(self) -> Claim | None:
        """Raise ConfigError if a process owns the directory that lives; return the claim, if any, of one that died."""
        while claims := read_claims(self._place):
            claim = claims[-1]
            alive = None if claim.owner is None else claim.owner.is_alive(seen_by=self._me)
            if alive or (alive is None and self._shows_life(claim)):
                owner, end_it = claim.owner, ""
                if owner is not None:
                    command = f"scancel {owner.job.split()[0]}" if owner.job else f"kill {owner.pid}"
                    end_it = f", end it (`{command}` on {owner.host})"
                raise ConfigError(
                    f"{self.directory}: is in use by {owner or 'another process'}, and two processes would spoil each "
                    f"other's files; wait until it has ended{end_it}, or choose another directory (run.name)"
                )
            if claim in read_claims(self._place):
                return claim
        return None

    def _shows_life(self, claim: Claim) -> bool:
        """Wait for a sign of life of an owner until it has given none for `LOST_S`; return whether there was one."""
        first, began, watched = claim.last_sign(), time.monotonic(), 0.0
        print_lines(
            f"{self.directory}: was taken by {claim.owner or 'a process'}; waiting up to {LOST_S:.0f} s for a sign of "
            "life of it",
        )
        while first is not None and (watched < CONFIRM_S or max(watched, time.time() - first) < LOST_S):
            time.sleep(LOOK_S)
            watched, last = time.monotonic() - began, claim.last_sign()
            if last != first:
                return last is not None
        return False

    def _claim_after(self, left: Claim | None) -> bool:
        """Make the claim that follows `left`, or the first one; return False if another process was faster."""
        token = self._me.token
        draft = self._place / f"draft-{token}"
        own = self._place / f"{left.number + 1 if left else 1:0{_DIGITS}d}"
        file = own / f"{token}.json"
        try:
            draft.mkdir(parents=True)
            (draft / file.name).write_text(json.dumps(asdict(self._me)), encoding="utf-8")
            draft.rename(own)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno not in _TAKEN:
                raise
        # Over NFS, a rename that succeeded may be repeated and then fail: what counts is what is there.
        claims = read_claims(self._place)
        if not claims or claims[-1].file != file or (left is not None and left not in claims):
            # Others have taken over, and may have ended, since this process looked.
            file.unlink(missing_ok=True)
            return False
        for claim in claims[:-1]:
            shutil.rmtree(claim.file.parent, ignore_errors=True)
        if left is not None:
            print_lines(f"{self.directory}: taken over from {left.owner or 'a process'}, which has died")
        self._file = file
        return True
