"""Define the errors that users meet. Each message says what, got, expected and the remedy, on one line."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `did you mean 'x'? ` for the nearest name; empty if none is near.

    Upper case does not count, and names of the same letters, as in `gpro`, are the nearest.
    """
    known = {each.casefold(): each for each in names}
    near = get_close_matches(name.casefold(), known, n=3)
    near.sort(key=lambda each: sorted(each) != sorted(name.casefold()))
    return f"did you mean {known[near[0]]!r}? " if near else ""


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type, out of range, or conflicts with another one."""


class UnknownKeyError(ConfigError):
    """A configuration has a key that no section has: its dotted name `key`, with the value `value`."""

    def __init__(self, message: str, key: str = "", value: object = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class DataError(ValueError):
    """Input data (a row, a file, a checkpoint) is not what it must be; the message names the row or file."""


class NonFiniteError(ArithmeticError):
    """A loss, log-prob or gradient became NaN or infinite; the message names the step and the row."""


class RehearsalError(ValueError):
    """Users' code returned something else than it must, or changed what it was given, when it was tried."""


class WeightSyncError(RuntimeError):
    """Trainer and engine disagree about the weights that were sent."""


class MismatchError(RuntimeError):
    """The rollout engine's log-probs differ from the trainer's by more than the gate allows."""


class RunError(RuntimeError):
    """Bad input was found only after the run had started."""


class StorageError(RuntimeError):
    """A file of the run could not be written; the message names its path, the space left there and the remedy."""


class WorkerError(RuntimeError):
    """A worker process of the run failed or died; the message names it and where its log is."""


class EngineDiedError(WorkerError):
    """An engine died that can be restarted; the caller that knows its work restarts it and repeats the work."""


class RunStopped(Exception):  # noqa: N818 - not an error: the run did what a signal asked for
    """A signal stopped the run after a checkpoint, from which `--resume` continues."""


class LargeReplyError(ValueError):
    """The error of a reply over HTTP that is longer than any that a run asks for."""
