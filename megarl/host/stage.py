"""Report to the driver how far each process has come with its work, through a small file per process."""

import contextlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from megarl.host.streams import print_lines
from megarl.host.temp_dir import PREFIX, is_private
from megarl.host.unicode import visible

# The directory of these files, below the run's temporary directory on each host.
DIRECTORY = "processes"
# Names the file of the process whose stage a `StageHandler` tells.
STAGE_FILE_VARIABLE = "MEGARL_STAGE_FILE"
STAGE_CHARS = 100


def process_files() -> Path:
    """Return the directory where processes of this run on this host leave their stages and stacks."""
    return Path(tempfile.gettempdir()) / DIRECTORY


def make_process_files() -> Path:
    """Make the directory `process_files()`, and return it."""
    if not is_private(Path(tempfile.gettempdir())):
        # On a host whose Ray megarl has not started, temporary files go where everybody may write.
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=PREFIX)
    process_files().mkdir(mode=0o700, exist_ok=True)
    return process_files()


def tell_stage(text: str) -> None:
    """Say how far this process has come, as in `micro-batch 3 of 8`, or by "" that it has; only runs keep it."""
    if not is_private(process_files()):
        return
    with contextlib.suppress(OSError):
        file = _stage_file()
        file.write_text(text, encoding="utf-8", errors="replace") if text else file.unlink()


def note_foreign(listener: str, number: int) -> None:
    """Print how many connections a listener has closed whose clients showed no key; a run also counts them."""
    print_lines(f"{listener}: closed {number} connections of clients that showed no key")
    if is_private(directory := process_files()):
        with contextlib.suppress(OSError), (directory / f"{listener}.foreign").open("a", encoding="ascii") as file:
            file.write(f"{number}\n")


def read_foreign() -> dict[str, int]:
    """Return how many connections the run's listeners on this host have closed, by the names of the listeners."""
    files = process_files().glob("*.foreign")
    return {file.stem: sum(map(int, file.read_text(encoding="ascii").split())) for file in files}


def _stage_file() -> Path:
    return process_files() / f"{os.getpid()}.stage"


class LineFormatter(logging.Formatter):
    """Formats a log record as one line, with everything hidden in it shown; the lines of a traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"    {visible(line)}" for line in super().formatException(ei).split("\n"))


class StageHandler(logging.Handler):
    """Tells the first line of each log record as the stage of the process that `logged_stages` was called in.

    Only while that process has a stage: once it is done, the log lines of its helpers no longer concern anybody.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with (
            contextlib.suppress(OSError),
            open(os.environ[STAGE_FILE_VARIABLE], "r+", encoding="utf-8", errors="replace") as file,
        ):
            file.write(record.getMessage().partition("\n")[0][:STAGE_CHARS])
            file.truncate()


def logged_stages(logger: str, *, level: str) -> dict[str, object]:
    """Return a configuration of logging (`dictConfig`) by which processes tell a logger's messages as this one's stage.

    level: from which on messages are also printed. For this process, and those that it starts from now on.
    """
    os.environ[STAGE_FILE_VARIABLE] = str(_stage_file())
    level = level.upper()
    lowest = min(level, "INFO", key=logging.getLevelNamesMapping().__getitem__)
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {
                "class": f"{__name__}.{LineFormatter.__name__}",
                "format": "%(levelname)s %(asctime)s %(filename)s:%(lineno)d %(message)s",
            }
        },
        "handlers": {
            "print": {"class": "logging.StreamHandler", "formatter": "line", "level": level},
            "stage": {"class": f"{__name__}.{StageHandler.__name__}", "level": "INFO"},
        },
        "loggers": {logger: {"handlers": ["print", "stage"], "level": lowest, "propagate": False}},
    }


def read_stage(directory: str, pid: int) -> str:
    """Return what a process of this host told last, or an empty text; `directory` is its `process_files()`."""
    try:
        # It may be read while it is written, and so in the middle of a character.
        return (Path(directory) / f"{pid}.stage").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
