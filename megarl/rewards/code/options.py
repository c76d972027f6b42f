"""How programs are run and what their results are worth."""

from dataclasses import dataclass, field
from enum import StrEnum

from megarl.errors import ConfigError
from megarl.sandbox import SandboxOptions


class Credit(StrEnum):
    """What a program gets that passes k of n tests: k/n, or 1 if k = n and 0 otherwise."""

    FRACTION = "fraction"
    ALL_OR_NOTHING = "all_or_nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """`float_tolerance` t: a number x is taken for y, written with a point or an exponent, if |x−y| ≤ t·max(1, |y|)."""

    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    credit: Credit = Credit.ALL_OR_NOTHING
    # None compares digits.
    float_tolerance: float | None = None
    # Only the first of many; None runs all.
    max_tests: int | None = None
    # A program that hangs does so often: after so many the other tests count as timed out too.
    max_timeouts: int = 3

    def __post_init__(self) -> None:
        if self.max_timeouts < 1:
            raise ConfigError(f"rewards.code.max_timeouts: got {self.max_timeouts}, expected at least 1")
        if self.max_tests is not None and self.max_tests < 1:
            raise ConfigError(f"rewards.code.max_tests: got {self.max_tests}, expected at least 1, or null for all")
        if self.float_tolerance is not None and not 0 <= self.float_tolerance < 1:
            raise ConfigError(f"rewards.code.float_tolerance: got {self.float_tolerance}, expected one in [0, 1)")
