"""An engine's actor knows which of its workers have ended, and ends those of the engine before it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from megarl.cluster import actors
from megarl.cluster.actors import EngineActor
from megarl.cluster.ending import end_run_processes
from megarl.config.schema import EngineConfig
from megarl.host.janitor import RUN_ID_VARIABLE
from megarl.rollout.engine_spec import EngineSpec

SPEC = EngineSpec(model_path="", dtype="float32", seed=0, max_model_tokens=1, config=EngineConfig(tp=2))


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(["sleep", "300"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_lost_workers(workers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def __init__(self, _: EngineSpec) -> None:
            """Has these processes as its workers."""

        def process_ids(self) -> list[int]:
            return [os.getpid(), *(process.pid for process in workers)]

    monkeypatch.setattr(actors, "VllmEngine", Engine)
    actor = EngineActor()
    # It may be asked before it has started its engine.
    assert actor.lost_workers() == []
    assert len(actor.start(SPEC, [])) == 3
    assert actor.lost_workers() == []
    workers[1].kill()
    while psutil.Process(workers[1].pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert actor.lost_workers() == [1]
    workers[1].wait()
    workers[0].kill()
    workers[0].wait()
    assert actor.lost_workers() == [0, 1]


def test_what_is_left_of_an_engine_is_ended_if_it_is_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id may be another process's by now."""
    monkeypatch.setenv(RUN_ID_VARIABLE, "ours")
    ours = subprocess.Popen(["sleep", "300"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setenv(RUN_ID_VARIABLE, "theirs")
    theirs = subprocess.Popen(["sleep", "300"])
    monkeypatch.setenv(RUN_ID_VARIABLE, "ours")
    try:
        end_run_processes([gone.pid, ours.pid, theirs.pid])
        assert ours.wait(timeout=0) == -signal.SIGKILL
        assert theirs.poll() is None
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait()
