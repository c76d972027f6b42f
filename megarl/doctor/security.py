"""Check who else can read, steer or join what this user runs here: directories, sockets, tokens, and a run's files."""

import contextlib
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import yaml

from megarl.doctor.finding import Finding, Severity
from megarl.doctor.machine import check_sandbox
from megarl.errors import DataError
from megarl.host.janitor import SHM_DIR
from megarl.host.listeners import Listener, listeners
from megarl.host.masking import masked
from megarl.host.reading import reading
from megarl.host.temp_dir import PREFIX
from megarl_sandbox.places import candidates, loose_place

_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH | stat.S_IXGRP | stat.S_IXOTH
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Files in which the tools that megarl works with keep tokens, below the home directory.
TOKEN_FILES = (
    ".cache/huggingface/token",
    ".cache/huggingface/stored_tokens",
    ".netrc",
    ".ray/auth_token",
    ".git-credentials",
    ".aws/credentials",
    ".config/wandb/settings",
)
# How many paths a finding names.
_NAMED = 3


def check_security(run_dir: Path | None, require_plain_data: Callable[[Path], None]) -> Iterator[Finding]:
    """Check the machine and, if one is given, a run's directory.

    require_plain_data: raises DataError for a checkpoint of which a file could run code when it is read.
    """
    for root in candidates():
        if root.is_dir():
            yield shared_directory_finding(root)
    if SHM_DIR.is_dir():
        yield shared_directory_finding(SHM_DIR)
    # Those of all users' runs.
    temporary = [path for root in candidates() for path in root.glob(f"{PREFIX}*")] + [*SHM_DIR.glob("megarl-*")]
    yield open_files_finding(temporary)
    own = [each.pid for each in psutil.process_iter(["uids"]) if each.info["uids"].real == os.getuid()]
    yield listeners_finding(listeners(own))
    yield tokens_finding(Path.home())
    yield core_dumps_finding(resource.getrlimit(resource.RLIMIT_CORE)[0])
    yield neighbours_finding({process.info["uids"].real for process in psutil.process_iter(["uids"])})
    yield check_sandbox()
    if run_dir is not None:
        yield from check_run(run_dir, require_plain_data)


def shared_directory_finding(directory: Path) -> Finding:
    """Report whether others could replace this user's files in a directory, or the directory itself."""
    loose = loose_place(directory)
    return Finding(
        subject=str(directory),
        found="others cannot replace files here" if loose is None else f"every user may replace what lies in {loose}",
        status=Severity.OK if loose is None else Severity.UNSAFE,
        advice="" if loose is None else f"chmod +t {loose}, or set TMPDIR to a directory of your own",
    )


def open_files_finding(paths: list[Path]) -> Finding:
    """Report this user's temporary files of runs that others may read or write."""
    modes = {}
    for path in paths:
        # A run may end meanwhile.
        with contextlib.suppress(FileNotFoundError):
            state = path.lstat()
            if state.st_uid == os.getuid():
                modes[path] = state.st_mode
    bare = [path for path, mode in modes.items() if mode & (_OTHERS_READ | _OTHERS_WRITE)]
    return Finding(
        subject="runs' temporary files",
        found=f"{len(bare)} of {len(modes)} are open to others: {_some(bare)}"
        if bare
        else f"{len(modes)}, all private",
        status=Severity.WARN if bare else Severity.OK,
        advice=f"end these runs, which an earlier megarl started, then rm -r {_some(bare)}" if bare else "",
    )


def listeners_finding(found: list[Listener]) -> Finding:
    """Report this user's sockets that other hosts can reach."""
    reachable = sorted({f"{each.process} at {each.address}:{each.port}" for each in found if not each.is_local})
    return Finding(
        subject="listening sockets",
        found=f"{len(found)} of this user's, {len(reachable)} beyond loopback"
        + (f": {', '.join(reachable[:_NAMED])}{' …' if len(reachable) > _NAMED else ''}" if reachable else ""),
        status=Severity.WARN if reachable else Severity.OK,
        advice="runs on one host need none of these, runs on several hosts need an isolated network (docs/security.md)"
        if reachable
        else "",
    )


def tokens_finding(home: Path) -> Finding:
    """Report files with tokens that others may read."""
    there = [file for name in TOKEN_FILES if (file := home / name).is_file()]
    closed = not home.stat().st_mode & stat.S_IXOTH and not home.stat().st_mode & stat.S_IXGRP
    bare = [] if closed else [file for file in there if file.stat().st_mode & _OTHERS_READ]
    return Finding(
        subject="files with tokens",
        found=f"others may read {_some(bare)}" if bare else f"{len(there)}, all private",
        status=Severity.WARN if bare else Severity.OK,
        advice=f"chmod 600 {_some(bare)}" if bare else "",
    )


def core_dumps_finding(soft: int) -> Finding:
    """Report whether a process that crashes leaves its memory, and so its secrets, in a file."""
    return Finding(
        subject="core dumps",
        found="off" if soft == 0 else "on: a core file holds the keys of its process",
        status=Severity.OK if soft == 0 else Severity.WARN,
        advice="" if soft == 0 else "ulimit -c 0",
    )


def neighbours_finding(uids: set[int]) -> Finding:
    """Report whether other people work on this host. Uids below 1000 are those of services."""
    others = sorted(uid for uid in uids if uid >= 1000 and uid not in (os.getuid(), 65534))
    return Finding(
        subject="other users",
        found=f"{len(others)} run processes here: uid {', '.join(map(str, others[:_NAMED]))}" if others else "none",
        advice="a job of several hosts wants exclusive nodes: #SBATCH --exclusive" if others else "",
    )


def check_run(run_dir: Path, require_plain_data: Callable[[Path], None]) -> Iterator[Finding]:
    """Check a run's directory: modes, owners, links, secrets in its configuration, and its checkpoints."""
    if not run_dir.is_dir():
        yield Finding(
            subject=str(run_dir), found="no such directory", status=Severity.UNSAFE, advice="name a run's directory"
        )
        return
    paths = [run_dir, *run_dir.rglob("*")]
    states = {path: path.lstat() for path in paths}
    links = [path for path, state in states.items() if stat.S_ISLNK(state.st_mode)]
    plain = {path: state for path, state in states.items() if not stat.S_ISLNK(state.st_mode)}
    writable = [path for path, state in plain.items() if state.st_mode & _OTHERS_WRITE]
    yield Finding(
        subject="who may write RUN",
        found=f"others may write {_some(writable)}" if writable else f"its owner alone ({len(paths)} files)",
        status=Severity.UNSAFE if writable else Severity.OK,
        advice=f"chmod -R go-w {run_dir}" if writable else "",
    )
    readable = {stat.S_IMODE(plain[run_dir].st_mode) & _OTHERS_READ} - {0}
    yield Finding(
        subject="who may read RUN",
        found=f"others, by its mode {stat.S_IMODE(plain[run_dir].st_mode):04o}" if readable else "its owner alone",
        advice=f"if run.share does not mean that: chmod 700 {run_dir}" if readable else "",
    )
    foreign = [path for path, state in states.items() if state.st_uid != os.getuid()]
    yield Finding(
        subject="owner of RUN",
        found=f"{_some(foreign)} belong to another user" if foreign else "this user",
        status=Severity.WARN if foreign else Severity.OK,
        advice="use its checkpoints only if you would run that user's programs" if foreign else "",
    )
    outside = [path for path in links if not path.resolve().is_relative_to(run_dir.resolve())]
    yield Finding(
        subject="links out of RUN",
        found=_some(outside) if outside else "none",
        status=Severity.WARN if outside else Severity.OK,
        advice="see what they point at before you delete or copy the run" if outside else "",
    )
    yield from _secrets_findings(run_dir)
    yield from _checkpoint_findings(run_dir, require_plain_data)


def _secrets_findings(run_dir: Path) -> Iterator[Finding]:
    bare = []
    for file in sorted(run_dir.rglob("config.yaml")):
        with reading(file, "YAML"):
            settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        if masked(settings) != settings:
            bare.append(file)
    yield Finding(
        subject="secrets in RUN",
        found=f"{_some(bare)} hold what looks like one" if bare else "none in its configurations",
        status=Severity.WARN if bare else Severity.OK,
        advice="replace the secret where it came from; name an environment variable in its place" if bare else "",
    )


def _checkpoint_findings(run_dir: Path, require_plain_data: Callable[[Path], None]) -> Iterator[Finding]:
    # step_N of step_N/ROLE/.metadata, since further files lie there.
    checkpoints = sorted({index.parents[1] for index in run_dir.rglob(".metadata")})
    for checkpoint in checkpoints:
        try:
            require_plain_data(checkpoint)
        except DataError as error:
            yield Finding(
                subject="checkpoints", found=str(error), status=Severity.UNSAFE, advice=f"do not load {checkpoint}"
            )
            return
    yield Finding(subject="checkpoints", found=f"{len(checkpoints)}, plain data all of them")


def _some(paths: list[Path]) -> str:
    return ", ".join(map(str, paths[:_NAMED])) + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")
