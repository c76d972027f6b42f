"""Remote processes for tests of what calls them: calls run in threads of this process."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

import pytest

from megarl.cluster.remotes import Location, PendingCall, Process

MakeProcess: TypeAlias = Callable[[str, Any], Process[Any]]


@contextmanager
def threaded_processes(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Iterator[MakeProcess]:
    """Makes a process of an object: remote calls run in threads, for whose results the module waits."""
    with ThreadPoolExecutor(8) as pool:

        class Actor:
            def __init__(self, target: Any) -> None:
                self.call = type("Call", (), {"remote": staticmethod(self.remote)})
                self.target = target

            def remote(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
                return pool.submit(getattr(self.target, method.__name__), *args, **kwargs)

        def results(calls: Sequence[PendingCall[Any]]) -> list[Any]:
            return [call.ref.result() for call in calls]

        def wait_all(calls: Sequence[PendingCall[Any]], **_: Any) -> list[Any]:
            """Raises what failed first, when all have ended, so that the next call finds them idle."""
            for future in list(as_completed([call.ref for call in calls], timeout=30)):
                future.result()
            return results(calls)

        monkeypatch.setattr(module, "wait_all", wait_all)
        monkeypatch.setattr(module, "results", results)
        here = Location(host="here", address="127.0.0.1", device_ids=())
        yield lambda name, target: Process(name=name, actor=Actor(target), location=here)
