"""Names for what can be refused, so that a message can say what is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


class StepError(Exception):
    """One step of shutting a program in failed."""

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(f"{name}: {error}")
        self.name = name
        self.reason = error.strerror or str(error)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Errors of the system within are errors of this step."""
    try:
        yield
    except OSError as error:
        raise StepError(name, error) from error
