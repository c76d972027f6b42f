"""Open programs in sandboxes, with megarl's errors; `megarl_sandbox` knows none of its settings."""

import contextlib
from collections.abc import Iterator

from megarl.errors import ConfigError, WorkerError
from megarl_sandbox import LostError, OptionError, Program, SandboxOptions, shared_sandbox


@contextlib.contextmanager
def settings_of(section: str) -> Iterator[None]:
    """Turn errors of sandboxes, whose options are the settings of `section`, into ConfigError and WorkerError."""
    try:
        yield
    except OptionError as error:
        raise ConfigError(f"{section}.{error}") from error
    except LostError as error:
        raise WorkerError(str(error)) from error


def open_program(source: str, options: SandboxOptions) -> Program:
    """Return a context that holds the program in this process's sandbox for these options."""
    with settings_of("rewards.code"):
        return shared_sandbox(options).program(source)
