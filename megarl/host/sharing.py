"""Decide who may read what a run writes, by the umask of every process that writes for it."""

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

Share: TypeAlias = Literal["group", "everyone"]
# Tells the umask to processes that others start: Ray's workers, and the hosts of a Slurm job.
VARIABLE = "MEGARL_UMASK"
_UMASKS: Mapping[Share | None, int] = {None: 0o077, "group": 0o027, "everyone": 0o022}


@contextlib.contextmanager
def shared_with(share: Share | None, directory: Path) -> Iterator[None]:
    """Let only this user, or those of `share` as well, read a directory and all that is written within this context.

    This holds for the processes that are started meanwhile, too. The directory is made if it is not there. If it
    belongs to another user, its own mode stays as it is.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _umask(_UMASKS[share]):
        directory.mkdir(exist_ok=True)
        # The group of new files may be that of the directory (setgid).
        special = directory.stat().st_mode & (stat.S_ISGID | stat.S_ISVTX)
        with contextlib.suppress(PermissionError):
            directory.chmod(special | 0o777 & ~_UMASKS[share])
        yield


def obey_umask(directory: Path) -> None:
    """Let those read the files below a directory whom the umask lets; safetensors writes them for this user alone."""
    os.umask(mask := os.umask(0o077))
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~mask)


@contextlib.contextmanager
def shared_as(directory: Path) -> Iterator[None]:
    """Within this context, let those read what is written who may read a directory that is there."""
    with _umask(0o777 & ~directory.stat().st_mode):
        yield


def umask_variable(share: Share | None) -> dict[str, str]:
    """Return the environment variable by which `adopt_umask` knows the umask of a run."""
    return {VARIABLE: f"{_UMASKS[share]:03o}"}


def adopt_umask() -> None:
    """Give this process the umask of the run that its environment names, if it names one."""
    if text := os.environ.get(VARIABLE):
        os.umask(int(text, 8))


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)
