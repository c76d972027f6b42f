"""Run coroutines in an event loop with a thread of its own, so that requests proceed while the caller works."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TypeVar

from megarl.host.clock import AwakeLoop

T = TypeVar("T")
_CLOSE_S = 5.0


class BackgroundLoop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        """Start the thread; `name` is for debuggers."""
        self._loop = AwakeLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Start a coroutine, and return a future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[object, object, None]) -> None:
        """Run a last coroutine, such as one that closes connections, and end the thread."""
        self.start(last).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()
