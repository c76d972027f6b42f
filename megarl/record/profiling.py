"""Profiler traces of chosen steps, one file per trainer rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class ProfiledWorkers(Protocol):
    """What this needs of a group of ranks."""

    def start_profile(self) -> None: ...

    def stop_profile(self, directory: Path) -> None: ...


class StepProfiler:
    """Profiles from the start of the first to the end of the last of `steps`; None: nothing."""

    def __init__(self, workers: ProfiledWorkers, steps: tuple[int, int] | None, directory: Path) -> None:
        self._workers, self._steps, self._directory = workers, steps, directory
        self._is_running = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """A step of the run. A resumed run starts in the middle of the window if it must."""
        if self._steps is not None and self._steps[0] <= step <= self._steps[1] and not self._is_running:
            self._workers.start_profile()
            self._is_running = True
        yield
        if self._is_running and self._steps is not None and step == self._steps[1]:
            self._workers.stop_profile(self._directory)
            self._is_running = False
