"""What a job remembers of its attempts over its lives."""

from pathlib import Path

import pytest

from megarl.launch.status import FAILED, FINISHED, STOPPED, AttemptLog

# Stopped by SIGUSR1 after a checkpoint, and before the first step.
IN_TRAINING, AT_START = (85, STOPPED), (138, STOPPED)


@pytest.mark.parametrize(
    ("attempts", "num_failures", "num_fruitless"),
    [
        ([], 0, 0),
        ([AT_START], 0, 1),
        ([AT_START, IN_TRAINING], 0, 0),
        ([IN_TRAINING, AT_START, AT_START], 0, 2),
        ([AT_START, (1, FAILED), AT_START], 1, 1),
        ([(137, FAILED), (1, FAILED), (0, FINISHED)], 2, 0),
    ],
)
def test_attempts(attempts: list[tuple[int, str]], num_failures: int, num_fruitless: int, tmp_path: Path) -> None:
    for code, reason in attempts:
        AttemptLog(tmp_path).add(0.0, code, reason)
    log = AttemptLog(tmp_path)
    assert [(attempt.exit_code, attempt.reason) for attempt in log.read()] == attempts
    assert (log.num_failures(), log.num_fruitless()) == (num_failures, num_fruitless)
