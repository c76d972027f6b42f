"""Processor seconds of each file of tests, and how many each may take."""

import os
from collections.abc import Generator, Mapping

import psutil
import pytest

# Folder or file → the most processor seconds, of the tests and of the processes that they start. The last line that
# fits is taken. Twice what a quiet machine needs for default and wide tests: a busy one counts more for the same work.
BUDGETS = {
    "": 120,
    "tests/unit/cluster/": 360,
    "tests/distributed/": 360,
    "tests/e2e/": 480,
    "tests/slurm/": 900,
}
# Set by CI, whose run fails when a file takes longer; elsewhere the summary only says so.
ENFORCED = "MEGARL_TEST_BUDGETS"


def budget(file: str) -> float:
    return [seconds for prefix, seconds in BUDGETS.items() if file.startswith(prefix)][-1]


def spent_s() -> float:
    """The processor time of this process and of all below it, those that have ended included."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue
    return total


class Budget:
    """Adds up what each file takes; forks hand their sums to the process that started them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._before: float | None = None
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
        if self._before is None:
            self._before = spent_s()
        done = yield
        if nextitem is None or nextitem.path != item.path:
            now = spent_s()
            self.add({item.nodeid.split("::")[0]: max(0.0, now - self._before)})
            self._before = now
        return done

    def add(self, seconds: Mapping[str, float]) -> None:
        for file, more in seconds.items():
            self.seconds[file] = self.seconds.get(file, 0.0) + more

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._over() and os.environ.get(ENFORCED) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _over(self) -> list[str]:
        by_default = "not long" in self._config.option.markexpr
        return [file for file, seconds in self.seconds.items() if by_default and seconds > budget(file)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.seconds) > 9:
            most = sorted(self.seconds, key=lambda file: -self.seconds[file])[:10]
            terminalreporter.section("processor seconds by file")
            for file in most:
                terminalreporter.line(f"{self.seconds[file]:6.1f}  {file}")
        for file in self._over():
            terminalreporter.line(
                f"{file}: took {self.seconds[file]:.0f} s of processor time, more than its {budget(file)} s in "
                "tests/helpers/budget.py; make its tests cheaper or mark further combinations `long`",
                red=True,
            )
