"""Tests in forks of the process that has collected them: `--forks 4`.

Workers of pytest-xdist import all modules of tests anew, ten seconds of a core each, so that only as many as there are
cores pay; these cost nothing more, and tests that wait leave the cores to others.
"""

import multiprocessing
import multiprocessing.forkserver
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import pytest

from tests.helpers.rank_pool import PRELOAD

FORK = multiprocessing.get_context("fork")
# Items of a session by their index.
Group = Sequence[int]
# What a fork sums up of its tests.
Sums = Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Worker:
    """A fork, and the tests it has got and not ended."""

    process: BaseProcess
    connection: Connection
    left: deque[int] = field(default_factory=deque)


class Forks:
    """Hands files, or what `scope` puts together, to forks in their order, and tells what these report."""

    def __init__(
        self, number: int, scope: Callable[[str], str], sums: Callable[[], Sums], add: Callable[[Sums], None]
    ) -> None:
        self._number, self._scope, self._sums, self._add = number, scope, sums, add

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        groups: dict[str, list[int]] = {}
        for index, item in enumerate(session.items):
            groups.setdefault(self._scope(item.nodeid.split("::")[0]), []).append(index)
        waiting = deque[Group](groups.values())
        # Made once: pytest empties the directory that a user names.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if any("rank_pool" in getattr(item, "fixturenames", ()) for item in session.items):
            # Imports for ten seconds, once for all forks.
            multiprocessing.forkserver.set_forkserver_preload(PRELOAD)
            multiprocessing.forkserver.ensure_running()
        workers = [self._start(session) for _ in range(min(self._number, len(waiting)))]
        while workers:
            for connection in wait([worker.connection for worker in workers]):
                worker = next(each for each in workers if each.connection is connection)
                if not self._hear(session, worker, waiting):
                    worker.process.join()
                    workers.remove(worker)
                    if worker.process.exitcode and not stops(session):
                        workers.append(self._replace(session, worker, waiting))
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _hear(self, session: pytest.Session, worker: Worker, waiting: deque[Group]) -> bool:
        """Whether the worker goes on."""
        try:
            told, content = worker.connection.recv()
        except EOFError:
            return False
        if told == "end":
            self._add(content)
        elif told == "next":
            group = waiting.popleft() if waiting and not stops(session) else ()
            worker.left.extend(group)
            worker.connection.send(group)
        else:
            found = session.config.hook.pytest_report_from_serializable(config=session.config, data=content)
            if found.when == "teardown":
                worker.left.popleft()
            session.config.hook.pytest_runtest_logreport(report=found)
        return told != "end"

    def _start(self, session: pytest.Session) -> Worker:
        session.config.pluginmanager.getplugin("terminalreporter").flush()
        here, there = FORK.Pipe()
        process = FORK.Process(target=self._work, args=(session, there, here))
        process.start()
        there.close()
        return Worker(process=process, connection=here)

    def _replace(self, session: pytest.Session, dead: Worker, waiting: deque[Group]) -> Worker:
        """Another one for one that died, whose test has failed."""
        why = f"the process of the tests ended, by {dead.process.exitcode}"
        if not dead.left:
            session.shouldfail = f"{why}, between two of them"
            raise session.Failed(session.shouldfail)
        item = session.items[dead.left.popleft()]
        found = pytest.TestReport(item.nodeid, item.location, {}, outcome="failed", longrepr=why, when="call")
        session.config.hook.pytest_runtest_logreport(report=found)
        if dead.left:
            waiting.appendleft(tuple(dead.left))
        return self._start(session)

    def _work(self, session: pytest.Session, connection: Connection, other: Connection) -> None:
        other.close()
        # It would wait for the server of ranks as if that were its own child.
        multiprocessing.forkserver._forkserver.ensure_running = lambda: None
        plugins = session.config.pluginmanager
        plugins.unregister(plugins.getplugin("terminalreporter"))
        plugins.register(Reporter(session.config, connection))
        # Files of captured output and of tests are this process's own; modules may hold the streams of their import.
        capture = plugins.getplugin("capturemanager")
        capture._global_capturing = None
        capture.start_global_capturing()
        capture.suspend_global_capture()
        factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.mktemp("fork")

        def following() -> deque[int]:
            connection.send(("next", None))
            return deque(connection.recv())

        left = following()
        while left and not stops(session):
            item = session.items[left.popleft()]
            left = left or following()
            # A test is told of the next one, whose fixtures it leaves standing.
            then = session.items[left[0]] if left else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
        session._setupstate.teardown_exact(None)
        connection.send(("end", self._sums()))


class Reporter:
    """Sends each report to the process that tells the user."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))


def stops(session: pytest.Session) -> bool:
    return bool(session.shouldfail or session.shouldstop)
