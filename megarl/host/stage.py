"""Tell the driver how far a process has come with its work, through a small file for each process of a host."""

import contextlib
import os
import tempfile
from pathlib import Path

# The directory of these files, below the run's temporary directory on each host.
DIRECTORY = "processes"


def process_files() -> Path:
    """Return the directory where processes of this run on this host leave their stages and stacks."""
    return Path(tempfile.gettempdir()) / DIRECTORY


def tell_stage(text: str) -> None:
    """Say how far this process has come, as in `micro-batch 3 of 8`; nothing is written outside of a run."""
    with contextlib.suppress(FileNotFoundError):
        (process_files() / f"{os.getpid()}.stage").write_text(text)


def read_stage(directory: str, pid: int) -> str:
    """Return what a process of this host told last, or an empty text; `directory` is its `process_files()`."""
    try:
        return (Path(directory) / f"{pid}.stage").read_text()
    except FileNotFoundError:
        return ""
