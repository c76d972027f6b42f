"""Whose death ends a run, and how often it does not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from megarl.cluster import remotes
from megarl.cluster.remotes import NOWHERE, Process, Roster
from megarl.errors import EngineDiedError, WorkerError


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Actors that Ray was told to end."""
    actors: list[str] = []
    monkeypatch.setattr(remotes.ray, "kill", actors.append)
    return actors


def processes(run: Roster, *actors: str) -> list[Process]:
    """Each is named as its actor, without the digit at the end."""
    made = [Process(name=actor[:-1], actor=actor, location=NOWHERE, roster=run) for actor in actors]
    for process in made:
        run.enter(process)
    return made


def test_a_death_that_nobody_allowed_ends_the_run(killed: list[str]) -> None:
    run = Roster()
    rank, engine = processes(run, "rank1", "engine1")
    error = run.report_death(engine, "generating: engine died")
    assert type(error) is WorkerError
    assert str(error) == "generating: engine died; see RUN/logs"
    run.allow_restarts(["engine"], 1)
    assert type(run.report_death(rank, "generating: rank died")) is WorkerError
    assert (list(run.living.values()), run.lost, killed) == ([rank, engine], {}, [])


def test_a_death_counts_once_until_restarts_are_used_up(killed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = Roster()
    run.allow_restarts(["engine"], 2)
    (first,) = processes(run, "engine1")
    for _ in range(2):
        assert type(run.report_death(first, "generating: engine died")) is EngineDiedError
    assert (run.lost, list(run.living.values()), run.num_restarts, killed) == ({"engine": first}, [], 1, ["engine1"])
    (second,) = processes(run, "engine2")
    assert (run.lost, list(run.living.values())) == ({}, [second])
    # What is left of its predecessor says nothing of it.
    assert type(run.report_death(first, "generating: engine died")) is EngineDiedError
    assert list(run.living.values()) == [second]
    assert type(run.report_death(second, "updating the actor: worker 0 of engine died")) is EngineDiedError
    (third,) = processes(run, "engine3")
    assert type(run.report_death(third, "syncing weights: engine died")) is WorkerError
    assert capsys.readouterr().out.splitlines() == [
        "warning: generating: engine died on its host; restart 1 of 2",
        "warning: updating the actor: worker 0 of engine died on its host; restart 2 of 2",
    ]
    run.allow_restarts(["engine"], 1)
    assert type(run.report_death(third, "syncing weights: engine died")) is EngineDiedError
    assert run.num_restarts == 1


def test_processes_that_a_host_takes_with_it_count_once(killed: list[str]) -> None:
    run = Roster()
    names = ["worker a", "worker b", "worker c"]
    run.allow_restarts(names, 1, by_host=True)
    for name, host in zip(names, ["h1", "h1", "h2"], strict=True):
        run.enter(Process(name=name, actor=name, location=replace(NOWHERE, host=host), roster=run))
    first, second, third = run.living.values()
    for each in (first, second):
        assert type(run.report_death(each, "conversing: died")) is EngineDiedError
    assert (run.num_restarts, [*run.lost], killed) == (1, names[:2], names[:2])
    assert type(run.report_death(third, "conversing: died")) is WorkerError
    # Once others have taken its place, the host's next death is another.
    for each in (first, second):
        run.enter(each)
    assert type(run.report_death(first, "conversing: died")) is WorkerError


def test_the_workers_of_an_engine_are_spread_evenly_over_its_nodes() -> None:
    here = replace(NOWHERE, host="a")
    assert [here.host_of(i, 2) for i in range(2)] == ["a", "a"]
    there = replace(here, further_hosts=("b", "a"))
    assert [there.host_of(i, 6) for i in range(6)] == ["a", "a", "b", "b", "a", "a"]
