"""A condition on a single number, and those that many keys share."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A condition on a single number, and how messages put it."""

    holds: Callable[[float], bool]
    expected: str


ANY_NUMBER = Range(holds=lambda x: True, expected="any number")
AT_LEAST_0 = Range(holds=lambda x: x >= 0, expected=">= 0")
AT_LEAST_1 = Range(holds=lambda x: x >= 1, expected=">= 1")
POSITIVE = Range(holds=lambda x: x > 0, expected="> 0")
SHARE = Range(holds=lambda x: 0 < x <= 1, expected="in (0, 1]")
FRACTION = Range(holds=lambda x: 0 <= x <= 1, expected="in [0, 1]")
