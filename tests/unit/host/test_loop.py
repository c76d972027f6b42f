"""Waits, and the tasks that go on during each of them."""

import asyncio

import pytest

from megarl.errors import WorkerError
from megarl.host import loop


async def fail(error: Exception) -> None:
    raise error


async def forever() -> None:
    await asyncio.Event().wait()


async def turn() -> str:
    await asyncio.sleep(0)
    return "turned"


def test_tasks_go_on_during_waits_alone() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append(await turn())

    task = loop.spawn(work())
    assert done == []
    loop.wait(task)
    assert done == ["turned"]
    assert loop.wait(turn()) == "turned"


def test_the_error_of_any_task_ends_the_wait_once() -> None:
    loop.spawn(fail(ValueError("a sample")))
    with pytest.raises(ValueError, match="a sample"):
        loop.wait(forever())
    assert loop.wait(turn()) == "turned"


def test_an_error_that_came_at_the_end_of_a_wait_ends_the_next() -> None:
    loop.spawn(fail(ValueError("late")))
    # The loop turns too rarely to notice.
    loop.event_loop().run_until_complete(turn())
    with pytest.raises(ValueError, match="late"):
        loop.wait(forever())


def test_a_death_explains_other_errors() -> None:
    loop.spawn(fail(ValueError("no answer")))
    loop.spawn(fail(WorkerError("engine 0 died")))
    with pytest.raises(WorkerError, match="engine 0 died"):
        loop.wait(forever())


def test_a_wait_that_was_interrupted_does_not_go_on() -> None:
    """Otherwise it takes the error of the next wait, which then has neither an error nor a result."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    loop.event_loop().call_later(0.01, interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.wait(forever())
    loop.spawn(fail(ValueError("the cause")))
    with pytest.raises(ValueError, match="the cause"):
        loop.wait(forever())


def test_abandoned_tasks_end_and_their_errors_are_forgotten() -> None:
    task = loop.spawn(forever())
    loop.spawn(fail(ValueError("nobody asks")))
    loop.abandon()
    assert task.cancelled()
    assert loop.wait(turn()) == "turned"


def test_waits_work_inside_another_loop() -> None:
    """As in the cells of a notebook; tasks still stand still between waits."""
    done: list[str] = []

    async def work() -> None:
        done.append(await turn())

    async def cell() -> None:
        task = loop.spawn(work())
        await asyncio.sleep(0)
        assert done == []
        loop.wait(task)
        loop.spawn(forever())
        with pytest.raises(ValueError, match="a sample"):
            loop.wait(fail(ValueError("a sample")))
        loop.abandon()

    asyncio.run(cell())
    assert done == ["turned"]
