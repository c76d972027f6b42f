"""Tools: calls that are read from turns, run, and answered, whatever they do."""

import asyncio
import random
import time
from collections.abc import Sequence

import pytest

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments import Action, Reply, ToolEnvironment, tools_of
from megarl.environments.games import Calculator, GuessingGame
from megarl.environments.parsers import PARSERS, read_calls
from megarl.errors import ConfigError
from megarl.types import Prompt


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def doze(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def shout() -> str:
    return "a" * 50 + "b" * 50


def tagged(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def reply(environment: ToolEnvironment, text: str, *, is_cut: bool = False) -> Reply:
    return asyncio.run(environment.reply(Action(text=text, turn=0, is_cut=is_cut)))


def results(environment: ToolEnvironment, text: str) -> list[str]:
    said = reply(environment, text)
    assert {message.role for message in said.messages} == {"tool"}
    return [message.content for message in said.messages]


def test_calls_of_a_turn_are_answered_in_order_and_together() -> None:
    tools = ToolEnvironment(tools=[add, doze, nap], side_by_side=["doze", "nap"])
    began = time.monotonic()
    text = "let me see" + call("nap", '{"seconds": 2.0}') + call("doze", '{"seconds": 2.0}')
    assert results(tools, text + call("add", '{"a": 1, "b": 2}')) == ["awake", "awake", "3"]
    assert time.monotonic() - began < 4.0
    assert reply(tools, call("add", '{"a": 1, "b": 2}')).num_calls == 1


def test_calls_of_a_turn_wait_for_one_another_unless_their_tools_say_otherwise() -> None:
    seen: list[str] = []

    async def write(text: str) -> str:
        await asyncio.sleep(0.02)
        seen.append(text)
        return text

    def read() -> str:
        return "".join(seen)

    async def both(text: str) -> str:
        seen.append(f"({text}")
        await asyncio.sleep(0.02)
        seen.append(f"{text})")
        return text

    tools = ToolEnvironment(tools=[write, read, both], side_by_side=["both"], in_prompt=False)
    turn = [call("write", '{"text": "a"}'), call("read", "{}"), call("write", '{"text": "b"}'), call("read", "{}")]
    assert results(tools, "".join(turn)) == ["a", "a", "b", "ab"]
    seen.clear()
    turn = [call("both", '{"text": "x"}'), call("both", '{"text": "y"}'), call("read", "{}")]
    assert results(tools, "".join(turn))[-1] in ("(x(yx)y)", "(x(yy)x)")


def test_a_turn_without_a_call_and_a_cut_turn_end_the_conversation() -> None:
    tools = ToolEnvironment(tools=[add])
    assert reply(tools, "the answer is 3").done
    assert reply(tools, call("add", '{"a": 1, "b": 2}'), is_cut=True).done


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (call("ad", "{}"), "error: there is no tool 'ad'; there are: add, doze, nap, shout"),
        (call("add", '{"a": 1}'), "error: TypeError: add() missing 1 required positional argument: 'b'"),
        (call("add", '{"a": 1, "b": "x"}'), "error: TypeError: unsupported operand type(s) for +: 'int' and 'str'"),
        (call("doze", '{"seconds": 9}'), "error: doze took longer than 1 s"),
        (call("nap", '{"seconds": 1.6}'), "error: nap took longer than 1 s"),
        (call("shout", "{}"), "a" * 10 + "\n[80 characters left out]\n" + "b" * 10),
        ("<tool_call>{nonsense</tool_call>", "error: this is no call, expected JSON with name and arguments: "),
        ("<tool_call>[1]</tool_call>", "error: this is no call"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "error: this is no call, expected name as a text"),
    ],
)
def test_what_goes_wrong_in_a_tool_is_said_to_the_policy(text: str, said: str) -> None:
    tools = ToolEnvironment(tools=[add, doze, nap, shout], timeout_s=1.0, max_result_chars=20)
    answer = reply(tools, text)
    # Errors are cut like other results, in their middle.
    (message,) = answer.messages
    assert message.content.startswith(said[:10])
    tools = ToolEnvironment(
        tools=[add, doze, nap, shout], timeout_s=1.0, max_result_chars=4096 if "error" in said else 20
    )
    assert results(tools, text)[0].startswith(said)
    assert answer.details == {"tool_errors": int("error" in said)}
    assert list(answer.warnings) == [0] * ("error" in said)


@pytest.mark.parametrize(
    ("parser", "text", "found"),
    [
        ("hermes", call("f", '{"a": 1}'), [("f", {"a": 1})]),
        # Without the closing tag, where it is a stop string.
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
        ("hermes", "no call", []),
        (
            "llama",
            ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            [("f", {"a": 1}), ("g", {})],
        ),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ("llama", 'I call {"name": "f"}', []),
        ("qwen3_coder", tagged("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"), [("f", {"a": "1"})]),
        ("qwen3_coder", tagged("<function=f>") + tagged("<function=g></function>"), [("", {}), ("g", {})]),
        (
            "qwen3_coder",
            tagged("<function=f><parameter=a>\nx < y\n\n</parameter><parameter=b></parameter></function>"),
            [("f", {"a": "x < y\n", "b": ""})],
        ),
        ("qwen3_coder", tagged("<function=f>some words</function>"), [("", {})]),
        ("glm", tagged("f\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n"), [("f", {"a": "[1]"})]),
        ("glm", tagged("f"), [("f", {})]),
        ("glm", tagged("f <arg_key>a</arg_key>"), [("", {})]),
        (
            "python",
            "```python\nprint(1)\n```\nand\n```py\nx\n```",
            [("python", {"code": "print(1)\n"}), ("python", {"code": "x\n"})],
        ),
        ("python", "```\nprint(1)\n```", []),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', [("f", {"a": 1})]),
        (
            "harmony",
            "<|channel|>analysis<|message|>{}<|end|><|start|>assistant to=g<|channel|>commentary json<|message|>{}",
            [("g", {})],
        ),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>[1]", [("", {})]),
        ("harmony", "<|channel|>commentary<|message|>I call f.<|end|><|start|>assistant<|channel|>final", []),
    ],
)
def test_parsers_read_the_forms_of_their_families(parser: str, text: str, found: Sequence[tuple[str, object]]) -> None:
    assert [(each.name, each.arguments) for each in PARSERS.get(parser)(text)] == found


TYPES = {"n": "integer", "x": "number", "on": "boolean", "many": "array", "text": "string", "odd": "integer"}


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm"])
def test_arguments_that_are_texts_get_the_types_of_the_schema(parser: str) -> None:
    written = {"n": "3", "x": "0.5", "on": "true", "many": '["a"]', "text": "7", "odd": "three", "unknown": "4"}
    parts = {
        "qwen3_coder": "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in written.items()),
        "glm": "".join(f"<arg_key>{n}</arg_key>\n<arg_value>{v}</arg_value>\n" for n, v in written.items()),
    }[parser]
    text = tagged(f"<function=f>\n{parts}</function>" if parser == "qwen3_coder" else f"f\n{parts}")
    properties = {name: {"type": kind} for name, kind in TYPES.items()}
    properties["text"] = {"anyOf": [{"type": "string"}, {"type": "integer"}]}  # type: ignore[dict-item]
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    (found,) = read_calls(PARSERS.get(parser), text, lambda: [schema])
    assert found.source == text
    read = {"n": 3, "x": 0.5, "on": True, "many": ["a"], "text": "7", "odd": "three", "unknown": "4"}
    assert found.arguments == read
    assert {name: type(value) for name, value in found.arguments.items()} == {n: type(v) for n, v in read.items()}


def test_a_long_turn_of_tags_is_read_once() -> None:
    """Patterns that try every pair of a million marks would not be done before this test's limit."""
    for mark in ("<arg_key>", "<parameter=a>", " ", "<function=f>", "</parameter>", "f <arg_key>a</arg_key>"):
        for parser in ("qwen3_coder", "glm"):
            (found,) = PARSERS.get(parser)(tagged(f"<function=f>{mark * (1_000_000 // len(mark))}"))
            assert found.error


# Pieces of turns that policies write, each in the middle of another.
PIECES = (
    "<tool_call>", "</tool_call>", "```python\n", "```py", "```", "\n", " " * 40, '{"name": ', '"add"', '"\\ud83d"',
    ', "arguments": ', ', "parameters": ', '{"a": 1, "b": 2}', '{"a":' * 3000, "[" * 3000, "1" * 5000, "NaN", "null",
    "-Infinity", "1e999", "}", "]", ";", '"', "\\", "'", "<|python_tag|>", "\x00", "\u2028", "\ud83d", "\U0001f600",
    "<|channel|>", " to=functions.add", "<|message|>", "<|start|>", "<|end|>", "<function=add>", "</function>",
    "<parameter=a>", "</parameter>", "add", "<arg_key>a</arg_key>", "<arg_value>",
    '{"name": "add", "arguments": "{}"}', '{"name": 5, "arguments": []}', '{"name": "add", "name": "f"}', "calc 1*2",
)  # fmt: skip


@pytest.mark.parametrize("parser", [*sorted(PARSERS), "patterns"])
def test_no_turn_that_a_policy_writes_is_more_than_an_error(parser: str) -> None:
    draw = random.Random(f"turns of {parser}")
    choice = {"patterns": {"add": r"calc (?P<a>.+)\*(?P<b>.+)"}} if parser == "patterns" else {"parser": parser}
    tools = ToolEnvironment(tools=[add], max_result_chars=200, **choice)  # type: ignore[arg-type]

    async def talk() -> None:
        for number in range(250):
            text = "".join(draw.choices(PIECES, k=draw.randint(1, 8)))
            if number % 2:
                text = {"llama": text.lstrip("`"), "python": f"```python\n{text}```"}.get(
                    parser, f"<tool_call>{text}</tool_call>"
                )
            answer = await tools.reply(Action(text=text, turn=0))
            assert answer.done or answer.messages
            assert all(len(message.content) < 300 for message in answer.messages)

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>" + '{"a":' * 3000),
        ("hermes", '<tool_call>{"name": "add", "arguments": "' + "[" * 3000 + '"}'),
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}'),
        ("llama", '{"name": "add", "parameters": ' + "[" * 3000),
        ("llama", '{"name": "add", "parameters": ' + "1" * 5000 + "}"),
    ],
)
def test_what_json_cannot_be_read_is_no_call(parser: str, text: str) -> None:
    (found,) = PARSERS.get(parser)(text)
    assert found.error.startswith("this is no call, expected JSON with name and arguments: ")


def test_an_open_block_of_line_feeds_takes_no_time() -> None:
    """Of a million line feeds a pattern that tries every pair would not be done before this test's limit."""
    assert PARSERS.get("python")("```python" + "\n" * 1_000_000) == []


def test_schemas_come_from_signatures_or_are_refused() -> None:
    (schema,) = ToolEnvironment(tools=[add]).tools
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first number.",
    }
    with pytest.raises(ConfigError, match=r"no schema can be made of doze.*set in_prompt to false"):
        _ = ToolEnvironment(tools=[doze]).tools
    assert ToolEnvironment(tools=[doze], in_prompt=False).tools == ()
    entry = EnvironmentEntry(type="tools", arguments={"tools": [f"{__name__}:add"]})
    assert tools_of(EnvironmentConfig(entries={"mine": entry}), "mine") == [schema]
    with pytest.raises(ConfigError, match="patterns: sub is not among the tools"):
        ToolEnvironment(tools=[add], patterns={"sub": "x"})


def test_the_calculator_multiplies_what_is_exactly_a_call() -> None:
    assert results(Calculator(), "calc 37*48") == ["1776"]
    assert reply(Calculator(), "calc 37*48 please").done
    assert reply(Calculator(), "#### 1776").done


def guessed(*guesses: str, number: int = 20, limit: int = 3) -> list[Reply]:
    """The replies to these guesses."""

    async def play() -> list[Reply]:
        game = GuessingGame()
        row = {"number": number, "low": 1, "high": 63, "guesses": limit}
        await game.start(Prompt(uid="a", token_ids=(1,), data_source="d", ground_truth="", extra_info=row))
        return [await game.reply(Action(text=text, turn=i)) for i, text in enumerate(guesses)]

    return asyncio.run(play())


def test_the_game_says_the_range_that_is_left() -> None:
    low, high, last = guessed("31", "15", "20")
    assert [low.messages[0].content, high.messages[0].content] == ["1-30", "16-30"]
    assert (last.done, last.reward, last.details) == (True, 1.0, {"correct": True})


def test_the_game_ends_with_its_guesses_and_with_what_is_no_number() -> None:
    assert guessed("1", "2", "3")[-1] == Reply(done=True, reward=0.0, details={"correct": False})
    assert guessed("twenty") == [Reply(done=True, details={"correct": False})]
