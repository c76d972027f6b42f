"""Remote processes for tests of what calls them: calls run in threads of this process."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

import pytest

from megarl.cluster.roster import Location, Process

MakeProcess: TypeAlias = Callable[[str, Any], Process]


@contextmanager
def threaded_processes(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Iterator[MakeProcess]:
    """Makes a process of an object: remote calls run in threads, and the module's `wait_all` waits for these."""
    with ThreadPoolExecutor(8) as pool:

        class Actor:
            def __init__(self, target: Any) -> None:
                self.call = type("Call", (), {"remote": staticmethod(self.remote)})
                self.target = target

            def remote(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
                return pool.submit(getattr(self.target, method), *args, **kwargs)

        def wait_all(calls: Sequence[tuple[Process, Future[Any]]], **_: Any) -> list[Any]:
            """Raises what failed first, when all have ended, so that the next call finds them idle."""
            ended = list(as_completed([future for _, future in calls], timeout=30))
            for future in ended:
                future.result()
            return [future.result() for _, future in calls]

        monkeypatch.setattr(module, "wait_all", wait_all)
        here = Location(host="here", address="127.0.0.1", device_ids=())
        yield lambda name, target: Process(name=name, actor=Actor(target), location=here)
