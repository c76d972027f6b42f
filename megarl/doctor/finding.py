"""One line of a diagnosis."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """`warn`: a run can start, but see the advice. `missing`: none can."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was looked at, what was found, and what to do about it (empty if nothing)."""

    subject: str
    found: str
    status: Status = Status.OK
    advice: str = ""
