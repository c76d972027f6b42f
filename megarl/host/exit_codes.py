"""Define the exit codes of a megarl command, and turn errors into them.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed; for doctor: a run cannot start here; for convert verify: the checkpoints differ |
| 2 | bad input; nothing was started |
| 85 | SIGTERM, SIGHUP or SIGUSR1 stopped the run in training, after a checkpoint of the step; `--resume` continues |
| 128 + n | ended at once by signal n: by SIGINT; by others before or after training, or if sent again after 2 s |
| 141 | the reader of the output has closed it, as `head` does |
"""

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from megarl.errors import (
    ConfigError,
    DataError,
    MismatchError,
    NonFiniteError,
    RunError,
    RunStopped,
    StorageError,
    WeightSyncError,
    WorkerError,
)
from megarl.host.masking import masked_text
from megarl.host.signals import leave_on_signals
from megarl.host.streams import print_lines
from megarl.host.user_code import place_of, told
from megarl.host.writing import problem, storage_cause

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 85
_STDOUT = 1


class RunOutcome(NamedTuple):
    """How a run ended: its state, the exit code by the module's table, and the message if it failed."""

    state: Literal["finished", "stopped", "failed"]
    exit_code: int
    error: str | None = None


def outcome_of(error: BaseException | None) -> RunOutcome:
    """Return how a run ended that this error ended, or none."""
    match error:
        case None:
            return RunOutcome("finished", 0)
        case RunStopped():
            return RunOutcome("stopped", EXIT_STOPPED)
        case KeyboardInterrupt():
            return RunOutcome("stopped", 128 + signal.SIGINT)
        case SystemExit():
            return RunOutcome("stopped", error.code if isinstance(error.code, int) else EXIT_FAILED)
        case _:
            return RunOutcome("failed", EXIT_FAILED, masked_text(str(error)))


@contextlib.contextmanager
def exit_on_errors() -> Iterator[None]:
    """Turn an error in this context into a one-line message and an exit code of the module's table."""
    received = leave_on_signals()
    try:
        yield
    except SystemExit as leaving:
        # Where Ray waits, it replaces the handler's exit code by its own.
        raise SystemExit(128 + received[0]) if received else leaving from None
    except (ConfigError, DataError) as error:
        _fail(error, EXIT_BAD_INPUT)
    except (MismatchError, NonFiniteError, RunError, StorageError, WeightSyncError, WorkerError) as error:
        _fail(error, EXIT_FAILED)
    except RunStopped as stopped:
        print_lines(stopped, file=sys.stderr)
        raise SystemExit(EXIT_STOPPED) from None
    except Exception as error:
        # Most writers name the file themselves.
        if isinstance(error, OSError) and (cause := storage_cause(error)) is not None:
            path = Path(os.fsdecode(cause.filename or "."))
            _fail(StorageError(f"{path.absolute()}: {problem(cause, path)}"), EXIT_FAILED)
        # An error of a user's code in this process.
        if not (place := place_of(error)):
            raise
        traceback.print_exception(error)
        _fail(RunError(f"{place}: {told(error)}"), EXIT_FAILED)
    finally:
        # The reader of the output (such as `head`) may be gone, even if no print has failed yet.
        poll = select.poll()
        poll.register(_STDOUT)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            # Python flushes its output buffers at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
            raise SystemExit(128 + signal.SIGPIPE) from None
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)


def _fail(error: Exception, code: int) -> NoReturn:
    # A library's message may span several lines, but is shown as one; it may quote a URL with a password.
    print_lines("error: " + masked_text(" ".join(str(error).split())), file=sys.stderr)
    raise SystemExit(code)
