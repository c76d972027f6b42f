"""Define the tasks that a program in a sandbox can be given, and their outcomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWithInput:
    """The task to run the program as a script that reads `text`."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A task that imports the program and calls its function named `function` with JSON values.

    If the program defines a class `Solution`, that class's method of this name is called.
    """

    function: str
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Run test code in a process of its own, which calls the program's functions in theirs; see `jail/testing.py`.

    The answer is JSON with `passed` and, if it did not, the `message`. The program's process never holds the test code.

    setup: code that both processes run first.
    entry_point: expression for the function under test, such as `f` or `Solution().f`.
    tolerance: of floats in `assert a == b`; None compares as Python does.
    """

    test: str
    setup: str = ""
    entry_point: str | None = None
    tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Run code in an interpreter that has run the program, and that keeps names and files from one cell to the next.

    The value of the last statement is printed, as an interactive interpreter does. Limits of output and of
    wall-clock time hold for each cell, the others for all together. An interpreter that goes over a limit, or ends, is
    ended; the next cell begins a new one, and so does a cell after another task.
    """

    code: str


ProgramTask: TypeAlias = RunWithInput | Call | Check | Cell


class Ending(StrEnum):
    """How a run of a program ended: `EXITED` by itself, or else ended by the sandbox or by a signal."""

    EXITED = "exited"
    # A cell is over, and its interpreter waits for the next one.
    WAITS = "waits"
    SIGNALLED = "signalled"
    CPU_TIME = "cpu_time"
    WALL_TIME = "wall_time"
    MEMORY = "memory"
    OUTPUT = "output"
    # The program ended the sandbox itself, or the sandbox did not answer.
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a task; `answer` is the result of `Call` (see `jail/values.py`) or the verdict of `Check`.

    exit_code: that of the process; after a cell whose interpreter waits, that which a script would have.
    """

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
        """Return whether the program, or the cell, ended by itself with exit code 0."""
        return self.ending in (Ending.EXITED, Ending.WAITS) and self.exit_code == 0
