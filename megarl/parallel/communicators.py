"""Free NCCL's device memory while the trainer is offloaded.

A suspended communicator keeps its connections, and its members its address; only its buffers are freed. All members
suspend and resume it together, and nobody may use it in between.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megarl.host.device.platform import platform


class Communicators:
    """The communicators of all process groups of this rank, awake or suspended."""

    def __init__(self) -> None:
        self._suspended: list[Any] = []

    def suspend(self) -> None:
        """Free the communicators' memory, unless they are suspended."""
        if not self._suspended:
            backends = platform().communicators()
            for backend in backends:
                backend.suspend()
            self._suspended = backends

    def resume(self) -> None:
        """Allocate the memory of suspended communicators again."""
        for backend in self._suspended:
            backend.resume()
        self._suspended = []

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Resume the communicators for a context that uses them; after it, unless it raised, they are as before."""
        was_suspended = bool(self._suspended)
        self.resume()
        yield
        if was_suspended:
            self.suspend()
