"""Record the failures of a job in a file beside its logs, which outlives the process and survives requeueing."""

import itertools
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.host.exit_codes import EXIT_STOPPED
from megarl.record.json_lines import append_lines, open_lines, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the run: when (seconds since 1970), the driver's exit code, and why it ended."""

    started: float
    ended: float
    exit_code: int
    reason: str


class AttemptLog:
    """The file LOGS/attempts.jsonl, which lists the attempts of a job."""

    def __init__(self, logs: Path) -> None:
        self._path = logs / "attempts.jsonl"

    def add(self, started: float, exit_code: int, reason: str) -> None:
        """Append the attempt that has just ended."""
        attempt = Attempt(started=started, ended=time.time(), exit_code=exit_code, reason=reason)
        with open_lines(self._path) as file:
            append_lines(file, [asdict(attempt)])

    def read(self) -> list[Attempt]:
        """Return all attempts, the oldest first."""
        return read_lines(
            self._path, lambda fields: Attempt(**fields), expected="an attempt of the job", missing_ok=True
        )

    def num_failures(self) -> int:
        """Count the attempts that failed; an attempt that ended because of a signal does not count."""
        return sum(attempt.reason == FAILED for attempt in self.read())

    def num_fruitless(self) -> int:
        """Count the latest attempts in a row that a signal ended before they had written a checkpoint."""
        fruitless = itertools.takewhile(
            lambda attempt: attempt.reason == STOPPED and attempt.exit_code != EXIT_STOPPED, reversed(self.read())
        )
        return sum(1 for _ in fruitless)


FAILED = "failed"
STOPPED = "stopped"
FINISHED = "finished"
