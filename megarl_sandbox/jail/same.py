"""Compare the values that programs return with the expected ones."""

import math
from typing import Any


def same_value(actual: Any, expected: Any, tolerance: float | None) -> bool:
    """Compare Python values; floats, also inside lists, tuples and dicts, may differ by `tolerance` if it is set."""
    try:
        if tolerance is None or actual == expected:
            return bool(actual == expected)
        if isinstance(expected, float) and isinstance(actual, int | float):
            return is_close(actual, expected, tolerance)
        if type(actual) is not type(expected):
            return False
        if isinstance(expected, list | tuple):
            pairs = zip(actual, expected, strict=False)
            return len(actual) == len(expected) and all(same_value(a, e, tolerance) for a, e in pairs)
        if isinstance(expected, dict):
            keys = expected.keys()
            return actual.keys() == keys and all(same_value(actual[k], expected[k], tolerance) for k in keys)
        return False
    except (RecursionError, ArithmeticError):
        # A signalling NaN may not be compared.
        return False


def is_close(actual: float, expected: float, tolerance: float) -> bool:
    """Return whether |actual − expected| ≤ tolerance · max(1, |expected|)."""
    try:
        return math.isfinite(actual) and abs(actual - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        # An integer may be too large for a float.
        return False
