"""Tests in forks are all run and told of, those that end their process included."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.helpers.forks import Forks

def pytest_configure(config):
    config.pluginmanager.register(Forks(2, str, dict, lambda sums: None))
"""
TESTS = """
import os
from pathlib import Path
import pytest

@pytest.fixture(scope="session")
def whole():
    yield
    Path(__file__).with_suffix(f".{os.getpid()}").touch()

@pytest.mark.parametrize("n", range(4))
def test_it(n, whole):
    print("said by", n)
    assert n != 1
    if n == 2:
        os._exit(3)
"""


def test_each_test_is_run_once_whatever_another_does_to_its_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "files"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED test_(.)\.py::test_it\[(\d)\](.*)", done.stdout, re.MULTILINE)
    assert sorted((name, n) for name, n, _ in failed) == [(name, n) for name in "ab" for n in "12"]
    assert [why for _, n, why in failed if n == "2"] == [" - the process of the tests ended, by 3"] * 2
    assert "said by 1" in done.stdout
    assert re.search(r"4 failed, 4 passed", done.stdout)
    # In the processes that took the place of those that died.
    assert 1 <= len([path for path in tmp_path.iterdir() if path.suffix[1:].isdigit()]) <= 2
