"""What of a conversion is done, so that one that was killed continues: OUT.partial/.convert.

`plan` names the conversion and appears when all files are preallocated; `done` gets a line per finished piece
with the checksum of its bytes. A continued conversion checks them: what a crash of the machine lost is done again.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from megarl.convert.plan import Plan

STATE = ".convert"
_PLAN, _DONE = "plan", "done"
# Of fixed width at the end, so that a line that was cut short is none.
_LINE = re.compile(r"(\d+) (\d{10})")


def fingerprint(plan: Plan, source: Sequence[object]) -> str:
    """Names a conversion: what is written where, and the files it is made from."""
    return hashlib.sha256(repr((plan.files, plan.pieces, tuple(source))).encode()).hexdigest()


class Journal:
    """The state of a conversion into a directory."""

    def __init__(self, directory: Path) -> None:
        self._plan, self._done = directory / STATE / _PLAN, directory / STATE / _DONE

    def name(self) -> str | None:
        """The conversion whose files are preallocated here."""
        return self._plan.read_text() if self._plan.is_file() else None

    def clear(self) -> None:
        """Nothing is done, and no conversion has begun."""
        self._plan.unlink(missing_ok=True)
        self._done.unlink(missing_ok=True)

    def begin(self, name: str) -> None:
        """All files are there; pieces follow."""
        partial = self._plan.with_suffix(".partial")
        partial.write_text(name)
        partial.replace(self._plan)

    def done(self) -> dict[int, int]:
        """Piece → checksum; lines that a crash cut short are left out."""
        lines = self._done.read_text().splitlines() if self._done.is_file() else ()
        found = (_LINE.fullmatch(line) for line in lines)
        return {int(each[1]): int(each[2]) for each in found if each}

    def add(self, piece: int, checksum: int) -> None:
        with self._done.open("a") as file:
            file.write(f"{piece} {checksum:010d}\n")
