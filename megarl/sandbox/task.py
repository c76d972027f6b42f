"""Tasks of a program that is shut in, and their outcomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWithInput:
    """Run the program as a script that reads `text`."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Import the program, and call its function, or its `Solution`'s method, of this name with JSON values."""

    function: str
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Import the program, and evaluate an expression among its names."""

    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """Import the program, and execute statements among its names; the answer is `token` if they raise nothing."""

    statements: str
    token: str


ProgramTask: TypeAlias = RunWithInput | Call | Evaluate | Execute


class Ending(StrEnum):
    """The way in which a run ended. All but `EXITED` were ended by the sandbox or a signal."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    CPU_TIME = "cpu_time"
    WALL_TIME = "wall_time"
    MEMORY = "memory"
    OUTPUT = "output"
    # The sandbox itself was ended from inside, or did not answer.
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a task. `answer` is what `Call`, `Evaluate` and `Execute` give, encoded by `jail/answer.py`."""

    ending: Ending
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float = 0.0
    stdout: bytes = b""
    # The last 4 KiB.
    stderr: bytes = b""
    answer: bytes = b""

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself, with exit code 0."""
        return self.ending is Ending.EXITED and self.exit_code == 0
