"""Time the parts of each sample's life in this process, where somebody asks for it."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

# Samples that no step takes are forgotten beyond this number, the oldest first.
MOST_SAMPLES = 100_000


class TimedPart(NamedTuple):
    """A part of a sample's life, such as a request to an engine, in nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int


class SampleTimes:
    """The parts of samples' lives, by prompt and index. is_kept: whether somebody asks for them."""

    def __init__(self) -> None:
        self.is_kept = False
        self._parts: dict[tuple[str, int], list[TimedPart]] = {}

    @contextlib.contextmanager
    def part(self, name: str, uid: str, sample_index: int) -> Iterator[None]:
        """Time what happens within this context."""
        start_ns = time.time_ns() if self.is_kept else 0
        yield
        if self.is_kept:
            # The system's time may be corrected meanwhile.
            part = TimedPart(name, start_ns, max(start_ns, time.time_ns()))
            self._parts.setdefault((uid, sample_index), []).append(part)
            while len(self._parts) > MOST_SAMPLES:
                del self._parts[next(iter(self._parts))]

    def take(self, uid: str, sample_index: int) -> list[TimedPart]:
        """Return the parts of a sample, in the order in which they ended, and forget them."""
        return self._parts.pop((uid, sample_index), [])


SAMPLE_TIMES = SampleTimes()
