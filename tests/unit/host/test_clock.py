"""Time limits while this process is stopped: the clock of the machine goes on, and what is awaited is not there yet."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator

import pytest

from megarl.cluster.processes import Watchdog
from megarl.cluster.remotes import Process
from megarl.environments.calls import attempt, in_thread
from megarl.host import clock, loop
from megarl.host.clock import awake_s
from megarl.rewards.background import BackgroundLoop
from megarl_sandbox.jail.watch import watch

LIMIT_S, STOP_S = 60.0, 3600.0
Stop = Callable[[], None]


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stop]:
    """Shows the time to this process that it sees after an hour's stop."""
    offsets, real = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + sum(offsets))
    clock._clock.cache_clear()
    yield lambda: offsets.append(STOP_S)
    clock._clock.cache_clear()


def test_stops_count_for_two_seconds_at_most(stop: Stop) -> None:
    before, began = awake_s(), time.monotonic()
    assert before == pytest.approx(began, abs=0.1)
    stop()
    assert time.monotonic() - began > STOP_S
    assert awake_s() - before == pytest.approx(clock.MOST_S, abs=clock.TICK_S)


async def turns(count: int = 5) -> int:
    """Let the loop look at its limits."""
    for _ in range(count):
        await asyncio.sleep(0)
    return 1


def of_environments(stop: Stop) -> int:
    async def work() -> int:
        stop()
        return await turns()

    return asyncio.run(attempt(work, LIMIT_S))


def of_functions(stop: Stop) -> int:
    async def call() -> int:
        running = asyncio.get_running_loop()

        def work() -> int:
            for each in (str, stop):
                each()
                asyncio.run_coroutine_threadsafe(turns(), running).result(5.0)
            return 1

        return await in_thread(work, timeout_s=LIMIT_S)

    return asyncio.run(call())


async def limited(stop: Stop) -> int:
    """Wait as HTTP clients do."""
    async with asyncio.timeout(LIMIT_S):
        stop()
        return await turns()


def of_judges(stop: Stop) -> int:
    background = BackgroundLoop("of a test")
    try:
        return background.start(limited(stop)).result()
    finally:
        background.close(asyncio.sleep(0))


def of_the_driver(stop: Stop) -> int:
    return loop.wait(limited(stop))


def of_processes(stop: Stop) -> int:
    engine = Process(name="engine 0", actor=None)
    watchdog = Watchdog(lambda: [engine], timeout_s=LIMIT_S, doing=lambda: "waiting")

    async def first() -> int:
        answer = asyncio.get_running_loop().create_future()

        async def go_on() -> None:
            stop()
            answer.set_result(await turns())

        keep = asyncio.ensure_future(go_on())
        (done,) = await watchdog.first_of([answer])
        await keep
        return int(done.result())

    return asyncio.run(first())


def of_programs(stop: Stop) -> int:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    looks = list[Stop]()

    def look() -> None:
        looks.append(stop)
        if len(looks) == 1:
            stop()
        elif len(looks) == 3:
            os.close(write)

    over = watch(child, [], wall_s=LIMIT_S, excess=look)
    os.waitpid(child, 0)
    return int(over is None)


KINDS = (of_environments, of_functions, of_judges, of_the_driver, of_processes, of_programs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_limit_counts_the_time_of_a_stop(kind: Callable[[Stop], int], stop: Stop) -> None:
    assert kind(stop) == 1
