"""Define the result of one check, as all checks of the doctor return it."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How serious a finding is. With `warn`, a run can start, but the advice is worth reading; with `missing`, no run
    can; with `unsafe`, other users can steer it.
    """

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"
    UNSAFE = "unsafe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of checking one subject: what was found, and what to do about it (empty if nothing)."""

    subject: str
    found: str
    status: Severity = Severity.OK
    advice: str = ""
