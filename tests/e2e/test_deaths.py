"""Whole runs in which a process dies or hangs, under each schedule that generates while it trains."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import psutil
import pytest

from megarl.host.janitor import RunScope
from tests.helpers.kill_resume import SCHEDULES, SmallRun, asynchronous_faults, differences, make_inputs
from tests.helpers.talk import talk_settings
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
NUM_STEPS = 12
HEARTBEAT_S, ANSWER_S = 4.0, 15.0
SETTINGS = (
    f"trainer.total_steps={NUM_STEPS}",
    "data.val=[]",
    "rollout.record=true",
)
HOST = "an environment worker dies"
# From a death to the line that names it; a machine with two cores is busy then.
NAMED_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What happens to whom, what the log says of it, within which time, and whether the run goes on without help.

    limit: the time limit that notices it, which on a busy machine would end runs where nothing hangs.
    """

    signum: signal.Signals
    title: str
    named: str
    within_s: float
    survived: bool
    limit: tuple[str, ...] = ()


FAILURES = {
    "an engine dies": Failure(
        signum=signal.SIGKILL,
        title="ray::EngineActor",
        named="engine 0 died.*restart 1 of",
        within_s=NAMED_S,
        survived=True,
    ),
    "an engine hangs": Failure(
        signum=signal.SIGSTOP,
        title="ray::EngineActor",
        named="engine 0 hangs: no sign of life for .* s .*is stopped.*restart 1 of",
        # The engine is asked twice a second.
        within_s=HEARTBEAT_S + NAMED_S,
        survived=True,
        limit=(f"cluster.heartbeat_timeout_s={HEARTBEAT_S}",),
    ),
    HOST: Failure(
        signum=signal.SIGKILL,
        title="ray::EnvironmentWorkerActor",
        named="environment worker 0 died.*restart 1 of",
        within_s=NAMED_S,
        survived=True,
    ),
    "a rank dies": Failure(
        signum=signal.SIGKILL,
        title="ray::RankActor",
        named="error: .*rank [01] died",
        # After the first failure the cause is looked for.
        within_s=2 * NAMED_S,
        survived=False,
    ),
    "a rank hangs": Failure(
        signum=signal.SIGSTOP,
        title="ray::RankActor",
        named="error: .*no answer from .*rank [01] within .* s .*is stopped",
        within_s=ANSWER_S + 2 * NAMED_S,
        survived=False,
        limit=(f"rollout.timeout_s={ANSWER_S}",),
    ),
    # Ray itself would end the driver without a word.
    "Ray's raylet is hung up": Failure(
        signum=signal.SIGHUP,
        title="raylet",
        named="error: .*Ray's raylet .* has ended by SIGHUP",
        # Ray has to be left without it, too.
        within_s=30.0,
        survived=False,
    ),
    "Ray's gcs_server dies": Failure(
        signum=signal.SIGKILL,
        title="gcs_server",
        named="error: .*Ray's gcs_server .* has ended by SIGKILL",
        within_s=30.0,
        survived=False,
    ),
}

DELAYS_S = {"after a step": 0.0, "within a step": 0.4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("deaths"))


# The last has conversations, with an environment that resumes.
RUNS = {name: SCHEDULES[name] for name in ("one_step_off", "async")} | {"talk": (*SCHEDULES["async"], *talk_settings())}
CASES = [
    (run, kind, moment)
    for run in RUNS
    for kind in FAILURES
    for moment in DELAYS_S
    if (kind in (HOST, "an engine dies") if run == "talk" else kind != HOST)
    if run == "one_step_off" or not kind.startswith("Ray")
]


@pytest.fixture(scope="module")
def undisturbed(inputs: Path) -> Callable[[str], SmallRun]:
    """By name of `RUNS`; each takes place once."""

    @cache
    def get(name: str) -> SmallRun:
        run = SmallRun(inputs=inputs, name=name, settings=(*RUNS[name], *SETTINGS))
        assert run.start().wait() == 0, log(run)
        return run

    return get


def log(run: SmallRun) -> str:
    return run.paths.root.with_suffix(".log").read_text()


@pytest.mark.parametrize(("name", "kind", "moment"), CASES)
def test_a_failure_is_named_and_the_run_ends_as_if_there_had_been_none(
    undisturbed: Callable[[str], SmallRun], name: str, kind: str, moment: str
) -> None:
    """After a resume if the process was a rank; no prompt is lost or trained on twice, and nothing stays behind."""
    failure, whole = FAILURES[kind], undisturbed(name)
    run = SmallRun(
        inputs=whole.inputs,
        name=re.sub(r"\W+", "-", f"{name}-{kind}-{moment}"),
        settings=whole.settings,
    )
    process = replace(run, settings=(*run.settings, *failure.limit)).start()
    try:
        scope = strike(process, run, failure, DELAYS_S[moment])
        assert (process.wait() == 0) == failure.survived, log(run)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not left_behind(scope), "the clean-up", timeout_s=30.0, seen=lambda: left_behind(scope))
    if not failure.survived:
        assert run.start().wait() == 0, log(run)
    if name in ("async", "talk"):
        faults, _ = asynchronous_faults(run, whole, NUM_STEPS)
    else:
        faults = [each for each in differences(run, whole) if "rollout/engine_restarts" not in each]
        if faults and failure.survived:
            # After an update nobody has the old weights: samples that the engine had not finished are of the new ones.
            faults, _ = asynchronous_faults(run, whole, NUM_STEPS)
    assert faults == []


def strike(process: subprocess.Popen[bytes], run: SmallRun, failure: Failure, delay_s: float) -> RunScope:
    """Send the signal in the middle of the run, and wait until the log names what happened; returns the run's scope."""
    told = partial(log, run)
    middle = NUM_STEPS // 3
    wait_until(lambda: run.last_step() >= middle, f"step {middle}", timeout_s=400.0, seen=told, process=process)
    time.sleep(delay_s)
    family: dict[int, list[str]] = {}
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            family[each.pid] = each.cmdline() or [""]
    (janitor,) = (command for command in family.values() if "megarl.host.janitor" in command)
    # What an actor forks, such as writers of a checkpoint, has its title and a later number.
    titles = {pid: command[0].removeprefix(f"{Path(command[0]).parent}/") for pid, command in family.items()}
    os.kill(min(pid for pid, title in titles.items() if title.startswith(failure.title)), failure.signum)
    wait_until(lambda: re.search(failure.named, told()), failure.named, timeout_s=failure.within_s, seen=told)
    return RunScope(run_id=janitor[-1])


def left_behind(scope: RunScope) -> list[str]:
    return [*map(str, scope.processes()), *map(str, scope.leftovers())]
