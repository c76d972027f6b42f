"""However a run ends, nothing of it stays: no process, no shared memory, no temporary file."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e import cli_run
from tests.e2e.cli_run import CliRun
from tests.e2e.support import RUN_FILE, SMALL
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.listeners import listeners_of
from tests.helpers.waiting import wait_until

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
GONE_WITHIN_S = 30.0
# In this time the driver comes to wait for a process that does not go on.
REACH_S = 3.0
ENDLESS = (
    "run.name=run",
    "run.dir=.",
    "data.val=[]",
    "rollout.num_samples=4",
    "rollout.max_response_tokens=16",
    "trainer.prompts_per_step=4",
    "trainer.total_steps=100000",
)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), tied=True)


@pytest.fixture
def start(plain_model: Path, sums: TaskFiles, tmp_path: Path) -> Iterator[Callable[..., CliRun]]:
    """Starts a training run that goes on until something ends it."""
    with contextlib.ExitStack() as stack:

        def start(*overrides: str) -> CliRun:
            inputs = (f"model.path={plain_model}", f"data.train=[{sums.train}]")
            run = cli_run.start(tmp_path, "train", str(RUN_FILE), *SMALL, *ENDLESS, *inputs, *overrides)
            stack.callback(run.end)
            return run

        yield start


def in_its_steps(run: CliRun, run_id: str) -> bool:
    metrics = run.stderr.parent / "run" / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= 2


def starting_actors(run: CliRun, run_id: str) -> bool:
    return bool(cli_run.processes(run_id, name="ray::RankActor"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Which signal goes to which process of the run, and when; the exit code, and what is printed.

    hung: processes that are stopped some seconds before, so that the driver waits for them and not for the target.
    settings: of the run.
    """

    signum: signal.Signals
    target: str
    exit_code: int
    message: str = ""
    hung: str = ""
    settings: tuple[str, ...] = ()
    when: Callable[[CliRun, str], bool] = in_its_steps


# tests/e2e/test_engine_restart.py has runs that go on.
NO_RESTARTS = ("rollout.max_engine_restarts=0",)
ENDINGS = {
    "ctrl-c": Ending(signum=signal.SIGINT, target="driver", exit_code=130),
    # In its steps a run answers SIGTERM with a checkpoint.
    "terminated": Ending(
        signum=signal.SIGTERM, target="driver", exit_code=85, message=r".*stopped by SIGTERM after step .*"
    ),
    "killed": Ending(signum=signal.SIGKILL, target="driver", exit_code=-9),
    "terminated-early": Ending(signum=signal.SIGTERM, target="driver", exit_code=143, when=starting_actors),
    "rank-killed": Ending(
        signum=signal.SIGKILL, target="ray::RankActor", exit_code=1, message=r"error: .*trainer rank [01] died; .*"
    ),
    "engine-killed": Ending(
        signum=signal.SIGKILL,
        target="ray::EngineActor",
        exit_code=1,
        message=r"error: .*engine 0 died; .*",
        settings=NO_RESTARTS,
    ),
    "idle-rank-killed": Ending(
        signum=signal.SIGKILL,
        target="ray::RankActor",
        exit_code=1,
        message=r"error: (generating|syncing weights): trainer rank [01] died; .*",
        hung="ray::EngineActor",
    ),
    "idle-engine-killed": Ending(
        signum=signal.SIGKILL,
        target="ray::EngineActor",
        exit_code=1,
        message=r"error: (running|updating|writing).*: engine 0 died; .*",
        hung="ray::RankActor",
        settings=NO_RESTARTS,
    ),
}


# What ends like another one, but for the moment, the signal or the process that dies. One of the janitor's tests kills
# a driver; on Slurm, runs are stopped in their steps.
LONG = (
    "ctrl-c",
    "terminated",
    "killed",
    "rank-killed",
    "engine-killed",
    "idle-rank-killed",
    "idle-engine-killed",
)


@pytest.mark.parametrize(
    "ending", [pytest.param(e, id=name, marks=pytest.mark.long if name in LONG else ()) for name, e in ENDINGS.items()]
)
def test_nothing_is_left(start: Callable[..., CliRun], ending: Ending) -> None:
    run = start(*ending.settings)
    run_id = run.run_id()
    run.wait_until(lambda: ending.when(run, run_id), "the moment to end the run")
    assert cli_run.leftovers(run_id)
    if ending.hung:
        for pid in cli_run.processes(run_id, name=ending.hung):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(REACH_S)
    os.kill(run.pid_of(ending.target, run_id), ending.signum)
    deadline = time.monotonic() + GONE_WITHIN_S
    assert run.process.wait(GONE_WITHIN_S) == ending.exit_code
    left = partial(cli_run.leftovers, run_id)
    wait_until(lambda: not left(), "the clean-up", timeout_s=deadline - time.monotonic(), seen=left)
    errors = run.stderr.read_text().splitlines()
    assert len(errors) == bool(ending.message), errors
    assert all(re.fullmatch(ending.message, line) for line in errors), errors


@pytest.mark.long
def test_a_layout_that_a_host_cannot_hold_is_refused_at_once(start: Callable[..., CliRun]) -> None:
    run = start("placement.mode=split", "cluster.num_cpus=1")
    run_id = run.run_id()
    assert run.process.wait(cli_run.START_S) == 1
    (error,) = run.stderr.read_text().splitlines()
    message = (
        r"error: placement: host \S+ \([\d.]+\) has 1 CPU, expected 1\.5 CPU for trainer and engines; use larger .*"
        r", raise cluster\.num_cpus"
    )
    assert re.fullmatch(message, error), error
    assert cli_run.leftovers(run_id) == []


def test_a_run_listens_on_loopback_where_the_page_says(start: Callable[..., CliRun]) -> None:
    run = start()
    run_id = run.run_id()
    run.wait_until(lambda: in_its_steps(run, run_id), "the first steps")
    found = listeners_of(run_id, run.process.pid)
    assert [each for each in found if each.address.removeprefix("::ffff:") not in ("127.0.0.1", "::1")] == []
    rows = SECURITY.read_text(encoding="utf-8").partition("## What listens where")[2].partition("\n\n#")[0]
    cells = [line.split("|")[2] for line in rows.splitlines() if line.startswith("|")]
    documented = {name for cell in cells for name in re.findall("`(?:ray::)?([^`]+)`", cell)}
    assert {each.process for each in found} <= documented
