"""What a wait for remote processes makes of those that die, hang or fail."""

import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError

from megarl.cluster.engines import EngineGroup
from megarl.cluster.processes import living_results, wait_all
from megarl.cluster.remotes import Process, results
from megarl.errors import EngineDiedError, NonFiniteError, WorkerError
from megarl.host import loop
from tests.helpers.remote_processes import (
    Worker,
    ask,
    attend_until,
    calls,
    collected,
    kill_after,
    request,
    start,
    start_run,
)


def test_what_those_who_did_not_answer_do_is_said(ray_session: None) -> None:
    """One is stopped, one waits in code of ours; the stacks of the second are kept."""
    stopped, waiting = start_run("trainer rank 0", "trainer rank 1")
    os.kill(stopped.location.pid, signal.SIGSTOP)
    pending = calls([stopped, waiting], ("answer", 0.0), ("wait_for_port",))
    try:
        with pytest.raises(WorkerError) as caught:
            wait_all(pending, timeout_s=4.0, doing="updating")
    finally:
        os.kill(stopped.location.pid, signal.SIGCONT)
    message = str(caught.value)
    assert message.startswith(
        "updating: no answer from trainer rank 0, trainer rank 1 within 4 s (trainer rank 0 is stopped; "
    )
    assert "trainer rank 1 is at megarl/cluster/ray_session.py:" in message
    assert "in _wait_for_port" in Path(waiting.location.files, f"{waiting.location.pid}.txt").read_text()


@pytest.mark.parametrize(
    "first_call", [pytest.param((), id="idle"), pytest.param(("answer", 0.0), id="done", marks=pytest.mark.long)]
)
def test_the_death_of_a_process_that_nobody_waits_for_ends_the_wait(ray_session: None, first_call: Any) -> None:
    """An engine that has nothing to do, or a rank that has done its part."""
    rank, doomed = start_run("trainer rank 0", "engine 0")
    pending = calls([rank], ("answer", 20.0)) + (calls([doomed], first_call) if first_call else [])
    kill_after(1.0, doomed)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"^updating: engine 0 died; see RUN/logs$"):
        wait_all(pending, timeout_s=120.0, doing="updating")
    # Within two seconds of the death; the rest is for a machine that does other things too.
    assert time.monotonic() - began < 1.0 + 2.0 + 7.0


def test_a_death_is_noticed_by_waits_that_are_all_short(ray_session: None) -> None:
    """Each wait of a step of a small model ends before it would look for deaths by itself."""
    rank, doomed = start_run("trainer rank 0", "engine 0")
    allow_restarts(doomed)
    kill_after(0.5, doomed)
    began = time.monotonic()
    while not doomed.roster.lost:
        assert wait_all(calls([rank], ("answer", 0.1)), timeout_s=120.0, doing="updating") == [0]
        # Within two seconds of the death; the rest is for a machine that does other things too.
        assert time.monotonic() - began < 0.5 + 2.0 + 7.0


def test_the_death_of_an_engines_worker_ends_the_wait(ray_session: None) -> None:
    rank, engine = start_run("trainer rank 0", "engine 0")
    results([engine.ask(Worker.lose, 1)])
    with pytest.raises(WorkerError, match=r"^updating: worker 1 of engine 0 died; see RUN/logs$"):
        wait_all(calls([rank], ("answer", 20.0)), timeout_s=120.0, doing="updating")


def allow_restarts(engine: Process[Worker]) -> Process[Worker]:
    engine.roster.allow_restarts([engine.name], 1)
    return engine


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_process_of_rays_own_is_named_before_those_that_end_with_it(
    ray_session: None, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that ends with it is not started again."""
    rank, engine = start_run("trainer rank 0", "engine 0")
    allow_restarts(engine)
    ended = subprocess.Popen(["sleep", "300"])
    ended.send_signal(signal.SIGHUP)
    ended.wait()
    node = SimpleNamespace(dead_processes=lambda: [("log_monitor", rank), ("raylet", ended)])
    pending = calls([rank], ("answer", 20.0)) if is_alone else calls([engine], ("answer", 20.0))
    if not is_alone:
        ray.kill(engine.actor)
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    expected = rf"^updating: Ray's raylet \(process {ended.pid}\) has ended by SIGHUP, and no run goes on without it; "
    with pytest.raises(WorkerError, match=expected):
        wait_all(pending, timeout_s=120.0, doing="updating")
    assert not engine.roster.lost


def test_an_engine_that_hangs_is_named_and_killed(ray_session: None) -> None:
    """One that works for long is not: it answers."""
    rank, engine = start_run("trainer rank 0", "engine 0", watched_s=2.0)
    working = calls([engine], ("answer", 5.0))
    assert wait_all([*working, *calls([rank], ("answer", 4.0))], timeout_s=120.0, doing="updating") == [1, 0]
    os.kill(engine.location.pid, signal.SIGSTOP)
    began = time.monotonic()
    message = r"^updating: engine 0 hangs: no sign of life for \d+ s \(engine 0 is stopped\); see RUN/logs$"
    with pytest.raises(WorkerError, match=message):
        wait_all(calls([rank], ("answer", 30.0)), timeout_s=60.0, doing="updating")
    # Within two seconds of the limit; the rest is for a machine that does other things too.
    assert time.monotonic() - began < 2.0 + 2.0 + 8.0
    assert not psutil.pid_exists(engine.location.pid)


def harmless(opened: Any) -> Any:
    """The request under way, but for tokens, so that no engine dies of it."""
    return replace(opened, request=request(opened.request.seed))


def test_others_take_over_from_an_engine_that_hangs(ray_session: None) -> None:
    """Although samples keep coming, so that no wait is ever without news."""
    engines = start_run("engine 0", "engine 1", watched_s=1.0)
    allow_restarts(engines[1])
    group = EngineGroup(engines, timeout_s=120.0)
    os.kill(engines[1].location.pid, signal.SIGSTOP)
    told = ask(group, [request(i) for i in range(60)])
    attend_until(group, lambda: group.living() == [0])
    # Engine 0 needs 0.2 s for each of its 30: it was still at work.
    assert len(told) < 30
    attend_until(group, lambda: len(told) == 60)
    assert sorted(told) == list(range(60))


def test_an_idle_engine_that_can_be_restarted_does_not_end_a_wait(ray_session: None) -> None:
    rank, engine = start_run("trainer rank 0", "engine 0")
    kill_after(0.5, allow_restarts(engine))
    assert wait_all(calls([rank], ("answer", 6.0)), timeout_s=60.0, doing="updating") == [0]
    assert engine.roster.lost == {"engine 0": engine}
    assert list(engine.roster.living.values()) == [rank]


def test_a_wait_for_an_engine_that_can_be_restarted_ends(ray_session: None) -> None:
    """Unless nobody needs its answer: then the others are waited for."""
    rank, engine = start_run("trainer rank 0", "engine 0")
    kill_after(0.5, allow_restarts(engine))
    with pytest.raises(EngineDiedError, match=r"^syncing weights: engine 0 died; see RUN/logs$"):
        wait_all(calls([rank, engine], ("answer", 20.0), ("answer", 20.0)), timeout_s=60.0, doing="syncing weights")
    rank, engine = start_run("trainer rank 0", "engine 0")
    kill_after(0.5, allow_restarts(engine))
    pending = calls([rank, engine], ("answer", 3.0), ("answer", 20.0))
    loop.wait(living_results(pending, timeout_s=60.0, doing="waking engines"))
    assert results(pending[:1], timeout_s=0) == [0]
    assert engine.roster.lost == {"engine 0": engine}


@pytest.mark.parametrize("lose", [True, False], ids=["lost a worker", "failed"])
def test_an_engine_that_fails_has_died_if_it_has_lost_a_worker(lose: bool, ray_session: None) -> None:
    """vLLM raises some error of its own. The engine, which would live on, is ended."""
    (engine,) = start_run("engine 0")
    allow_restarts(engine)
    if lose:
        results([engine.ask(Worker.lose, 1)])
    with pytest.raises(WorkerError) as caught:
        wait_all(calls([engine], ("fail", RuntimeError("cancelled"), 0.0)), timeout_s=120.0, doing="syncing weights")
    # With the line of these tests that raised, as code of users.
    raised = r"engine 0 failed at \S+/remote_processes\.py:\d+ with RuntimeError: cancelled"
    what = "worker 1 of engine 0 died" if lose else raised
    assert re.fullmatch(f"syncing weights: {what}; see RUN/logs", str(caught.value))
    assert isinstance(caught.value, EngineDiedError) is lose
    if lose:
        # A call that lasts: one that does not could be answered before the end arrives.
        with pytest.raises(ActorDiedError):
            results([engine.ask(Worker.answer, 20.0)])
    else:
        assert results([engine.ask(Worker.answer, 0.0)]) == [0]


def test_who_is_busy_with_something_else_is_asked_once(ray_session: None) -> None:
    rank, engine = start_run("trainer rank 0", "engine 0")
    # It works for longer than the wait lasts, on a busy machine too.
    working = calls([engine], ("answer", 8.0))
    assert wait_all(calls([rank], ("answer", 2.0)), timeout_s=120.0, doing="updating") == [0]
    assert wait_all(working, timeout_s=120.0, doing="generating") == [1]
    assert results([engine.ask(Worker.times_asked)]) == [1]


def test_a_process_that_died_earlier_is_the_cause_of_an_error(ray_session: None) -> None:
    rank, doomed = start_run("trainer rank 0", "engine 0")
    os.kill(doomed.location.pid, signal.SIGKILL)
    pending = calls([rank], ("fail", RuntimeError("Connection closed by peer"), 0.1))
    with pytest.raises(WorkerError, match=r"^updating: engine 0 died; see RUN/logs$"):
        wait_all(pending, timeout_s=120.0, doing="updating")


def test_a_dead_process_is_the_cause_and_not_its_peers_errors(processes: list[Process[Worker]]) -> None:
    """As with a rank: its peers' collectives fail first, with what sounds like a network problem."""
    doomed = start(7)
    results([doomed.ask(Worker.answer, 0.0)])
    pending = calls([processes[0], doomed], ("fail", RuntimeError("Connection closed by peer"), 0.0), ("die", 0.3))
    with pytest.raises(WorkerError, match="updating: trainer rank 7 died; see RUN/logs"):
        wait_all(pending, timeout_s=120.0, doing="updating")


def test_failures_while_results_stream_in(processes: list[Process[Worker]]) -> None:
    group = EngineGroup(processes[:2], timeout_s=120.0)
    with pytest.raises(NonFiniteError, match="weights are spoiled"):
        collected(group, [request(0, max_tokens=-1), request(1), request(2)])
    # A process of its own: it dies.
    group = EngineGroup([processes[0], start(1)], timeout_s=120.0)
    group.processes[1].ask(Worker.allow_death)
    with pytest.raises(WorkerError, match="generating: trainer rank 1 died"):
        collected(group, [request(0), request(1, max_tokens=0), request(2), request(3)])
    group = EngineGroup([processes[0]], timeout_s=120.0)
    ask(group, [request(0)])
    with pytest.raises(WorkerError, match="generating: no answer from trainer rank 0 within 0 s"):
        attend_until(group, lambda: False, timeout_s=0.05)


def test_a_wait_that_nothing_can_end_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"^ticket 7: no engine has anything left to generate$"):
        attend_until(EngineGroup([], timeout_s=1.0), lambda: False, timeout_s=0.05, doing=lambda: "ticket 7")


def test_what_others_generate_is_taken_when_an_engine_dies(ray_session: None) -> None:
    engines = start_run("engine 0", "engine 1")
    allow_restarts(engines[1])
    # Engine 1 finishes its last request, and dies at the one before.
    requests = [request(0), request(1), request(2), request(3, max_tokens=0), request(4), request(5)]
    group = EngineGroup(engines, timeout_s=120.0)
    group.repeats_batches = True
    found = ask(group, requests)
    attend_until(group, lambda: 5 in found)
    engines[1].ask(Worker.allow_death)
    attend_until(group, lambda: group.orphans() == [1] and group.are_idle([0]))
    assert engines[1].roster.lost == {"engine 1": engines[1]}
    assert group.living() == [0]
    assert found.keys() == {0, 2, 4, 5}
    # The living engine takes over what is left; the request that kills an engine is not asked of it.
    group._batches[1] = {key: harmless(each) for key, each in group._open.items()}
    group._open |= group._batches[1]
    group.start_again(1, exactly=False)
    assert group.orphans() == []
    attend_until(group, lambda: len(found) == 6)


def test_a_repeated_batch_tells_of_what_had_finished_no_more(ray_session: None) -> None:
    engines = start_run("engine 0", "engine 1")
    allow_restarts(engines[1])
    group = EngineGroup(engines, timeout_s=120.0)
    group.repeats_batches = True
    # Engine 1 finishes request 5, and dies at 3.
    requests = [request(0), request(1), request(2), request(3, max_tokens=0), request(4), request(5)]
    told = ask(group, requests)
    attend_until(group, lambda: len(told) == 4)
    engines[1].ask(Worker.allow_death)
    attend_until(group, lambda: group.orphans() == [1])
    group.processes[1] = replace(engines[1], actor=start(1).actor)
    engines[1].roster.enter(group.processes[1])
    group._batches[1] = {key: harmless(each) for key, each in group._batches[1].items()}
    assert [each.request.seed for each in group._batches[1].values()] == [1, 3, 5]
    group.start_again(1, exactly=True)
    attend_until(group, lambda: group.are_idle([0, 1]))
    ray.kill(group.processes[1].actor)
    assert sorted(told) == [0, 1, 2, 3, 4, 5]


def test_requests_that_came_while_no_engine_lived_go_to_the_next_one(ray_session: None) -> None:
    (engine,) = start_run("engine 0")
    allow_restarts(engine)
    group = EngineGroup([engine], timeout_s=120.0)
    engine.ask(Worker.allow_death)
    found = ask(group, [request(0, max_tokens=0)])
    attend_until(group, lambda: group.living() == [])
    missed = ask(group, [request(7)])
    attend_until(group, group.are_missed)
    assert (group.orphans(), missed) == ([0], {})
    group.processes[0] = replace(engine, actor=start(0).actor)
    engine.roster.enter(group.processes[0])
    assert not group.are_missed()
    group.flush()
    attend_until(group, lambda: len(missed) == 1)
    ray.kill(group.processes[0].actor)
    assert (missed, found) == ({0: [7, 0]}, {})


def test_completions_come_while_another_process_is_waited_for(ray_session: None) -> None:
    """And a wait for samples that ended meanwhile does not wait for more."""
    rank, engine = start_run("trainer rank 0", "engine 0")
    group = EngineGroup([engine], timeout_s=120.0)
    found = ask(group, [request(0), request(1)])
    assert wait_all(calls([rank], ("answer", 4.0)), timeout_s=120.0, doing="updating") == [0]
    assert found.keys() == {0, 1}
    attend_until(group, lambda: len(found) == 2, timeout_s=0.0)
