"""Whether what a program gave is what was expected of it."""

import math
import re
from typing import Any

# Whole numbers are exact: a tolerance would take 1000001 for 1000000.
_INEXACT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


def same_output(actual: str, expected: str, tolerance: float | None) -> bool:
    """Line by line and word by word. How words are spaced, and empty lines, do not count."""
    actual_lines, expected_lines = _words(actual), _words(expected)
    return len(actual_lines) == len(expected_lines) and all(
        len(a) == len(e) and all(_same_word(x, y, tolerance) for x, y in zip(a, e, strict=True))
        for a, e in zip(actual_lines, expected_lines, strict=True)
    )


def same_value(actual: Any, expected: Any, tolerance: float | None) -> bool:
    """Equality of Python; with a tolerance, floats within lists, tuples and dicts may differ by it."""
    try:
        return _same(actual, expected, tolerance)
    except RecursionError:
        return False


def as_json(value: Any) -> Any:
    """A value as JSON would have kept it: tuples are lists, keys of dicts are strings."""
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    return value


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _same_word(actual: str, expected: str, tolerance: float | None) -> bool:
    if actual == expected:
        return True
    if tolerance is None or not _INEXACT.fullmatch(expected):
        return False
    try:
        return _is_close(float(actual), float(expected), tolerance)
    except ValueError:
        return False


def _same(actual: Any, expected: Any, tolerance: float | None) -> bool:
    if tolerance is None or actual == expected:
        return bool(actual == expected)
    if isinstance(expected, float) and isinstance(actual, int | float):
        return _is_close(actual, expected, tolerance)
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(_same, actual, expected, [tolerance] * len(expected)))
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(_same(actual[k], expected[k], tolerance) for k in expected)
    return False


def _is_close(actual: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isfinite(actual) and abs(actual - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        # An integer beyond every float.
        return False
