"""Jobs of the scorers in tests.helpers.hostile_scorers, and the processes of a pool."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megarl.rewards.verifier import JobResult, VerifierJob, VerifierOptions
from tests.helpers.waiting import wait_until

SCORERS = "tests.helpers.hostile_scorers"
# These scorers need no algebra, whose import takes a pool most of its start.
bare = partial(VerifierOptions, num_workers=1, preload=())


def without_algebra() -> AbstractContextManager[object]:
    """Nor do functions of users here, whose pools import it for the run's."""
    return patch("megarl.rewards.custom.functions.VerifierOptions", lambda **options: bare(**options | {"preload": ()}))


def job(scorer: str, response: str = "a", ground_truth: str = "a", **extra_info: str) -> VerifierJob:
    return VerifierJob(
        data_source="test",
        response=response,
        ground_truth=ground_truth,
        function=f"{SCORERS}:{scorer}",
        extra_info=extra_info,
    )


def details_of(verdict: JobResult) -> dict[str, Any]:
    """Of the scorer `process`: `pid` is the worker's, `parent` the fork server's."""
    assert verdict.reward is not None
    return dict(verdict.reward.details)


def wait_for_end(pid: int, seconds: float = 5.0) -> None:
    wait_until(lambda: not is_alive(pid), f"the end of process {pid}", timeout_s=seconds)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    # The second: the process ended between the opening and the reading of its file.
    except (FileNotFoundError, ProcessLookupError):
        return False
