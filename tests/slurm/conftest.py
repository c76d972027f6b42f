"""One Slurm of two nodes for all tests, and runs that jobs work on."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.kill_resume import make_inputs
from tests.slurm.lab import SlurmLab, install, missing
from tests.slurm.runs import SlurmRun, finish_here


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All of them are among the long tests too, since CI leaves them out where `tools/affected.py` says so."""
    for item in items:
        if "tests/slurm/" in item.path.as_posix():
            item.add_marker("slurm")
            if config.option.markexpr == "long":
                item.add_marker("long")


@pytest.fixture(scope="session")
def lab() -> Iterator[SlurmLab]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    install()
    lab = SlurmLab()
    try:
        lab.up()
        yield lab
    finally:
        lab.down()


@pytest.fixture(scope="session")
def inputs() -> Iterator[Path]:
    """A tiny model and its data, on storage that all nodes share."""
    directory = Path(tempfile.mkdtemp(prefix="megarl-slurm-", dir="/var/tmp"))
    try:
        yield make_inputs(directory)
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def reference(inputs: Path) -> SlurmRun:
    """The supervised run of these tests, uninterrupted, on this machine alone."""
    run = SlurmRun(inputs=inputs, name="reference", command="sft", nodes=1)
    finish_here(run)
    return run


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
