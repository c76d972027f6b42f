"""The one way in which tests wait for what other processes and threads do."""

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found],
    what: str,
    *,
    timeout_s: float = 60.0,
    seen: Callable[[], object] | None = None,
    process: subprocess.Popen[Any] | None = None,
    most_pause_s: float = 0.05,
) -> Found:
    """Return the first value of a condition that is true; fail after the time, or once `process` has ended.

    `most_pause_s`: longer where asking takes processor time. The failure names what was waited for and what was last
    seen: what `seen` says, else the condition's last value.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        # Asked first: the process may meet the condition and end at once.
        exit_code = process.poll() if process is not None else None
        if value := condition():
            return value
        late = time.monotonic() > deadline
        if exit_code is not None or late:
            cause = f"not within {timeout_s:g} s" if late else f"the process ended with {exit_code}"
            raise AssertionError(f"waited for {what}: {cause}; last seen: {value if seen is None else seen()}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, most_pause_s)
