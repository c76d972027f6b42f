"""Python as a tool and the repair of programs, in real sandboxes."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments import Action, Environment, Reply, open_environments, tools_of
from megarl.environments.code import PythonEnvironment, RepairEnvironment
from megarl.errors import ConfigError
from megarl.types import Prompt


def prompt(test: str = "") -> Prompt:
    return Prompt(uid="a", token_ids=(1,), data_source="d", ground_truth=test)


def fenced(code: str) -> str:
    return f"I try\n```python\n{code}\n```"


def talk(environment: Environment, *turns: str, test: str = "", past: Sequence[str] = ()) -> list[Reply]:
    """The replies to these turns, after a resume if there are turns in the past."""

    async def run() -> list[Reply]:
        if past:
            earlier = [Action(text=text, turn=i) for i, text in enumerate(past)]
            assert await environment.resume(prompt(test), earlier)
        else:
            await environment.start(prompt(test))
        replies = [await environment.reply(Action(text=text, turn=i)) for i, text in enumerate(turns)]
        await environment.close()
        return replies

    return asyncio.run(run())


def python(**arguments: Any) -> PythonEnvironment:
    return PythonEnvironment(**{"parser": "python", "in_prompt": False, **arguments})


def contents(replies: Sequence[Reply]) -> list[str]:
    return [message.content for reply in replies for message in reply.messages]


def test_names_last_from_turn_to_turn_and_the_last_value_is_shown() -> None:
    replies = talk(python(), fenced("x = 37 * 48"), fenced("print('so')\nx + 1"), "#### 1777")
    assert contents(replies) == ["(no output)", "so\n1777"]
    assert [reply.done for reply in replies] == [False, False, True]
    assert [reply.details for reply in replies[:2]] == [{"tool_errors": 0}] * 2


def test_calls_of_a_turn_run_in_their_order() -> None:
    turn = "\n".join(
        fenced(code) for code in ("n = [1]", "import time; time.sleep(0.2); n.append(2)", "n.append(3)", "n")
    )
    assert contents(talk(python(), turn))[-1] == "[1, 2, 3]"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", 'Traceback (most recent call last):\n  File "cell 2", line 1, in <module>\n    1 / 0\n'),
        ("exit(3)", "error: exit code 3"),
    ],
)
def test_an_error_is_told_and_loses_nothing(code: str, said: str) -> None:
    _, error, after = talk(python(), fenced("x = 5"), fenced(code), fenced("x"))
    assert error.messages[0].content.startswith(said)
    assert error.details == {"tool_errors": 1}
    assert contents([after]) == ["5"]


@pytest.mark.parametrize(
    ("timeout_s", "code", "why"),
    [
        (1.0, "print('begun', flush=True)\nwhile True: pass", "took longer than 1 s"),
        (60.0, "import os; print('begun', flush=True); os._exit(4)", "ended the interpreter with exit code 4"),
        (60.0, "print('begun', flush=True)\nx = b'x' * (90 << 20)\nos.kill(os.getpid(), 11)", "was ended by signal 11"),
    ],
)
def test_an_interpreter_that_is_ended_costs_its_names_and_the_policy_is_told(
    timeout_s: float, code: str, why: str
) -> None:
    tool = python(timeout_s=timeout_s, limits={"memory_mib": 256}, setup="import os\nkept = 1")
    _, error, after = talk(tool, fenced("x = 5"), fenced(code), fenced("kept, 'x' in globals()"))
    assert contents([error]) == [
        f"begun\nerror: the code {why}; the next call starts a new interpreter, without names and files of this one"
    ]
    assert contents([after]) == ["(1, False)"]


def test_output_beyond_its_limit_and_long_results() -> None:
    tool = python(limits={"output_mib": 0.01}, max_result_chars=20)
    flood, long = talk(tool, fenced("print('x' * 20_000)"), fenced("print('a' * 50 + 'b' * 50)"))
    assert flood.details == {"tool_errors": 1}
    assert contents([long]) == ["a" * 10 + "\n[80 characters left out]\n" + "b" * 10]


def test_a_call_costs_only_its_own_sample() -> None:
    async def run() -> tuple[list[Reply], float]:
        slow, quick = python(timeout_s=6.0), python()
        began = time.monotonic()
        hanging = asyncio.create_task(slow.reply(Action(text=fenced("import time; time.sleep(60)"), turn=0)))
        replies = [await quick.reply(Action(text=fenced("1 + 1"), turn=0))]
        took = time.monotonic() - began
        replies.append(await hanging)
        await asyncio.gather(slow.close(), quick.close())
        return replies, took

    (answer, late), took = asyncio.run(run())
    assert contents([answer]) == ["2"]
    assert "took longer than 6 s" in contents([late])[0]
    assert took < 6.0


def test_close_ends_the_process_also_while_a_call_runs() -> None:
    async def run() -> psutil.Process:
        tool = python(timeout_s=3.0)
        await tool.reply(Action(text=fenced("x = 1"), turn=0))
        assert tool._program is not None
        keeper = psutil.Process(tool._program.keeper)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tool.reply(Action(text=fenced("import time; time.sleep(60)"), turn=1)), 0.2)
        await tool.close()
        return keeper

    keeper = asyncio.run(run())
    assert psutil.wait_procs([keeper], timeout=10)[1] == []


def test_resume_runs_earlier_code_again_and_no_other_tool() -> None:
    called = []

    def note(a: int) -> str:
        called.append(a)
        return "noted"

    tool = PythonEnvironment(tools=[note], in_prompt=False, parser="hermes")
    call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
    past = [call.format("python", '{"code": "x = 2"}'), call.format("note", '{"a": 1}')]
    past += [call.format("python", '{"code": "x += 3; 1 / 0"}'), call.format("python", '{"cod": 1}')]
    assert contents(talk(tool, call.format("python", '{"code": "x"}'), past=past)) == ["5"]
    assert called == []


def test_the_policy_is_told_of_python_and_of_other_tools() -> None:
    entry = EnvironmentEntry(type="python", arguments={"tools": ["tests.unit.environments.test_tools:add"]})
    names = [tool["function"]["name"] for tool in tools_of(EnvironmentConfig(entries={"mine": entry}), "mine")]
    assert names == ["python", "add"]
    first, _ = PythonEnvironment(tools=["tests.unit.environments.test_tools:add"]).tools
    assert first["function"]["parameters"]["required"] == ["code"]


@pytest.mark.parametrize("kind", ["python", "repair"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"isolation": "none"}, "isolation: got 'none', expected one of auto, namespaces, landlock, limits_only"),
        ({"limits": {"memory": 1}}, "entries.mine.arguments: .*unexpected keyword argument 'memory'"),
        ({"limits": {"memory_mib": 0}}, "limits.memory_mib: got 0, expected more than 0"),
    ],
)
def test_wrong_arguments_are_refused_at_the_start(kind: str, arguments: dict[str, Any], message: str) -> None:
    config = EnvironmentConfig(entries={"mine": EnvironmentEntry(type=kind, arguments=arguments)})
    with pytest.raises(ConfigError, match=message):
        open_environments(config, ["mine"])


TEST = 'for x, y in [(2, 8), (5, 20)]:\n    assert f(x) == y, f"f({x}) is {f(x)}, not {y}"'


def test_a_program_is_repaired_by_what_its_test_says() -> None:
    turns = ("def f(x): return x + 3", fenced("def f(x): return x + 6"), "def f(x): return x * 4")
    first, second, last = talk(RepairEnvironment(), *turns, test=TEST)
    assert contents([first, second]) == [
        "f(2) is 5, not 8",
        "f(5) is 11, not 20",
    ]
    assert (first.reward, first.done, first.details) == (0.0, False, {"correct": False})
    assert (last.reward, last.done, last.details) == (1.0, True, {"correct": True})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(x) return x", "SyntaxError: expected ':'"),
        ("def g(x): return x", "NameError: name 'f' is not defined (line 2 of test)"),
        ("def f(x):\n    while True: pass", "it took longer than 1 s"),
        ("def f(x): return 1 / 0", "ZeroDivisionError: division by zero (line 2 of test)"),
        ("import os\nos._exit(0)", "it ended the interpreter with exit code 0"),
        # A program cannot see its test, nor answer for it.
        ("class E:\n    def __eq__(self, other): return True\ndef f(x): return E()", "f(2) is "),
    ],
)
def test_why_programs_fail(source: str, said: str) -> None:
    (reply,) = talk(RepairEnvironment(timeout_s=1.0), source, test=TEST)
    assert contents([reply])[0].startswith(said)
    assert (reply.reward, reply.done) == (0.0, False)


def test_a_repair_goes_on_after_a_resume() -> None:
    (reply,) = talk(RepairEnvironment(), "def f(x): return 4 * x", test=TEST, past=["def f(x): return 0"])
    assert reply.done
