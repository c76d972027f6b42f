"""Calls of what users wrote: what hangs, raises or returns anything costs neither the process nor its neighbours."""

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megarl.environments import Action, ToolEnvironment, calls
from megarl.environments.calls import CallThreads, EscapedError, LateError, attempt, contained, describe
from tests.helpers.waiting import wait_until
from tests.unit.environments.test_tools import call


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> CallThreads:
    """Two threads of this test's own."""
    mine = CallThreads(2)
    monkeypatch.setattr(calls, "THREADS", mine)
    return mine


def hang() -> str:
    threading.Event().wait()
    return "never"


def quick() -> str:
    return "fine"


def said(tools: ToolEnvironment, *turns: str) -> list[str]:
    """What the policy reads after these turns, taken at once."""

    async def talk() -> list[str]:
        replies = await asyncio.gather(*(tools.reply(Action(text=turn, turn=0)) for turn in turns))
        return [message.content for reply in replies for message in reply.messages]

    return asyncio.run(talk())


def test_calls_that_never_return_leave_their_places_to_others(threads: CallThreads) -> None:
    tools = ToolEnvironment(tools=[hang, quick], timeout_s=1.0)
    turns = [call("hang", "{}")] * 8 + [call("quick", "{}")] * 3
    # Those that wait for a place are not late meanwhile.
    assert said(tools, *turns) == ["error: hang took longer than 1 s"] * 8 + ["fine"] * 3
    assert threads.late() == ["hang"] * 8


def test_a_thread_that_hangs_in_python_is_asked_to_end(threads: CallThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.0)

    def spin() -> None:
        for _ in itertools.count():
            pass

    assert said(ToolEnvironment(tools=[spin], timeout_s=0.1), call("spin", "{}")) == [
        "error: spin took longer than 0.1 s"
    ]

    def returned() -> bool:
        assert threads.submit(quick).result(30) == "fine"
        return not threads.late()

    wait_until(returned, "the end of the thread", timeout_s=30, seen=threads.late)


def test_the_loops_own_threads_may_be_these(threads: CallThreads) -> None:
    """As a host sets them, for environments that call asyncio.to_thread."""

    async def talk() -> str:
        asyncio.get_running_loop().set_default_executor(threads)
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(hang), 0.05)
        return await asyncio.to_thread(quick)

    assert asyncio.run(talk()) == "fine"
    assert threads.late() == ["hang"] * 4


def test_a_function_may_be_late_itself() -> None:
    def gives_up() -> None:
        raise TimeoutError("no answer from the city")

    tools = ToolEnvironment(tools=[gives_up], timeout_s=30)
    assert said(tools, call("gives_up", "{}")) == ["error: TimeoutError: no answer from the city"]


def test_a_coroutine_that_will_not_be_cancelled_is_left() -> None:
    release = asyncio.Event()

    async def stubborn() -> str:
        for _ in range(3):
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "never"

    async def talk() -> list[str]:
        tools = ToolEnvironment(tools=[stubborn, quick], timeout_s=1.0)
        replies = [
            await tools.reply(Action(text=call(name, "{}"), turn=0)) for name in ("stubborn", "quick", "stubborn")
        ]
        # So that the loop may end.
        release.set()
        return [reply.messages[0].content for reply in replies]

    late = "error: stubborn took longer than 1 s"
    assert asyncio.run(talk()) == [late, "fine", late]


class MuteError(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (StopIteration(), "StopIteration"),
        (BaseExceptionGroup("two", [SystemExit(1)]), "BaseExceptionGroup: two (1 sub-exception)"),
        (MuteError(), "MuteError: (its text cannot be written: LookupError)"),
        (ValueError("bad \ud83d input"), "ValueError: bad \ud83d input"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_raises_is_an_error_that_the_policy_reads(
    raised: BaseException, text: str, is_async: bool
) -> None:
    def fails() -> None:
        raise raised

    async def fails_later() -> None:
        await asyncio.sleep(0)
        raise raised

    if is_async and isinstance(raised, StopIteration):
        text = "RuntimeError: coroutine raised StopIteration"
    tools = ToolEnvironment(tools=[quick], timeout_s=20)
    tools._functions["fails"] = fails_later if is_async else fails
    assert said(tools, call("fails", "{}") + call("quick", "{}")) == [f"error: {text}", "fine"]


def test_only_who_is_cancelled_itself_sees_a_cancellation() -> None:
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    async def talk() -> None:
        with pytest.raises(EscapedError):
            await contained(cancels_itself())
        with pytest.raises(LateError, match=r"^took longer than 0.01 s$"):
            await attempt(lambda: asyncio.sleep(60), 0.01)
        task = asyncio.create_task(attempt(lambda: asyncio.sleep(60), 60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(talk())


def deep() -> Any:
    made: Any = []
    for _ in range(100_000):
        made = [made]
    return made


def cyclic() -> Any:
    made: list[Any] = []
    made.append(made)
    return made


class Unwritable:
    def __str__(self) -> str:
        raise SystemExit(5)


def awaited() -> Awaitable[str]:
    """Look like no coroutine function, as one with a decorator does."""

    async def answer() -> str:
        return "later"

    return answer()


@pytest.mark.parametrize(
    ("returned", "begins"),
    [
        (lambda: "x" * 50_000_000, "x" * 100),
        (lambda: bytes(3), '"b'),
        (lambda: float("nan"), "NaN"),
        (lambda: 10**5000, "error: ValueError: Exceeds the limit"),
        (deep, "error: RecursionError: "),
        (cyclic, "error: ValueError: Circular reference detected"),
        (lambda: {1, 2}, '"{1, 2}"'),
        (lambda: {(1, 2): 3}, "error: TypeError: keys must be str"),
        (Unwritable, "error: SystemExit: 5"),
        (lambda: (i for i in range(3)), "error: TypeError: the tool returned a generator"),
        (awaited, "later"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_tool_returns_the_policy_reads(returned: Callable[[], Any], begins: str, is_async: bool) -> None:
    async def later() -> Any:
        return returned()

    tools = ToolEnvironment(max_result_chars=300)
    tools._functions["f"] = later if is_async else returned
    if is_async and returned is awaited:
        return
    (read,) = said(tools, call("f", "{}"))
    assert read.startswith(begins)
    assert len(read) < 400


def test_a_turn_that_repeats_itself_makes_no_calls() -> None:
    made: list[int] = []
    tools = ToolEnvironment(tools=[quick], max_result_chars=10**9)
    tools._functions["count"] = lambda: made.append(1)
    (read,) = said(tools, call("count", "{}") * 65)
    assert read == "error: this turn has 65 calls, expected at most 64; none of them was made"
    assert not made
    # As many as may be share what a reply may have.
    tools._functions["long"] = lambda: "x" * 500_000
    assert sum(map(len, said(tools, call("long", "{}") * 64))) < 1_000_000


def test_a_process_ends_while_its_calls_hang() -> None:
    program = (
        "import asyncio, threading\n"
        "from megarl.environments.calls import LateError, in_thread\n"
        "async def main():\n"
        "    try:\n"
        "        await in_thread(threading.Event().wait, timeout_s=0.1)\n"
        "    except LateError as late:\n"
        "        print(late)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert ended.stdout == b"took longer than 0.1 s\n"


def test_errors_say_what_they_are() -> None:
    assert describe(KeyError("a")) == "KeyError: 'a'"
    assert describe(EscapedError("SystemExit: 3")) == "SystemExit: 3"


def test_a_key_in_an_error_is_not_the_policys_to_read() -> None:
    error = OSError("401 for https://api.example.com/find?q=cats&api_key=s3cret")
    assert describe(error) == "OSError: 401 for https://api.example.com/find?q=cats&api_key=***masked***"
