"""Define a test of a program, and compare what a program printed or returned with what is expected of it."""

import json
import re
from dataclasses import dataclass
from typing import Any

from megarl_sandbox import Check, Outcome, ProgramTask, RunWithInput
from megarl_sandbox.jail.same import is_close, same_value
from megarl_sandbox.jail.values import decode

# Integers are compared exactly, because a tolerance would accept 1000001 for 1000000.
_INEXACT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A test: the task for a program, and the output or value that is expected of it. A `Check` decides by itself."""

    # Keeps pytest from collecting this class as a test.
    __test__ = False

    task: ProgramTask
    expected: Any = None
    tolerance: float | None = None

    def accepts(self, outcome: Outcome) -> bool:
        """Return whether a run succeeded with the expected result. A function's result may also be the only item of a
        list.
        """
        if isinstance(self.task, RunWithInput):
            return same_output(outcome.stdout.decode(errors="replace"), self.expected, self.tolerance)
        if isinstance(self.task, Check):
            return json.loads(outcome.answer)["passed"] is True
        try:
            # An equal answer is no larger; a list of one item may be left out.
            value = as_json(decode(outcome.answer, _size(self.expected)))
            is_wrapped = isinstance(self.expected, list) and len(self.expected) == 1
            return same_value(value, self.expected, self.tolerance) or (
                is_wrapped and same_value(value, self.expected[0], self.tolerance)
            )
        # Python refuses to write a key of very many digits.
        except (ValueError, RecursionError):
            return False


def same_output(actual: str, expected: str, tolerance: float | None) -> bool:
    """Compare outputs line by line and word by word, ignoring the amount of space and empty lines."""
    a, e = ([words for line in text.splitlines() if (words := line.split())] for text in (actual, expected))
    if [len(words) for words in a] != [len(words) for words in e]:
        return False
    for word, wanted in zip((w for words in a for w in words), (w for words in e for w in words), strict=True):
        if word == wanted:
            continue
        if tolerance is None or not _INEXACT.fullmatch(wanted):
            return False
        try:
            if not is_close(float(word), float(wanted), tolerance):
                return False
        except ValueError:
            return False
    return True


def _size(value: object) -> int:
    """Count the values of JSON, keys included."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1


def as_json(value: Any) -> object:
    """Convert a value as a round trip through JSON would: tuples and arrays to lists, keys of dicts to strings."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    return value
