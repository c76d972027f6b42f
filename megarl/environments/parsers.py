"""Find the tool calls in a turn of the policy, in the formats of the model families."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from megarl.data.harmony import read_channels
from megarl.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the policy wrote. error: why it cannot be read; empty: it can. source: the text of it.

    is_text: arguments are texts, whose types only the tool's schema tells.
    """

    name: str = ""
    arguments: Mapping[str, Any]
    error: str = ""
    source: str = ""
    is_text: bool = False


Parser: TypeAlias = Callable[[str], Sequence[ToolCall]]
PARSERS: Registry[Parser] = Registry("parser of tool calls", key="environment.entries.*.arguments.parser")

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)
_GLM_FUNCTION = re.compile(r"([^<>\n]++)\s*+((?:<arg_key>.*)?)", re.DOTALL)
_GLM_PARAMETER = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_FENCED = re.compile(r"```(?:python|py)[^\S\n]*\n(.*?)```", re.DOTALL)


@PARSERS.register("hermes", "qwen")
def parse_hermes(text: str) -> list[ToolCall]:
    """Read calls as Hermes and Qwen write them: JSON with name and arguments between <tool_call> tags.

    >>> parse_hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')[0].arguments
    {'a': 1}
    """
    return [replace(_from_json(found[1]), source=found[0]) for found in _HERMES.finditer(text)]


@PARSERS.register("qwen3_coder")
def parse_qwen3_coder(text: str) -> list[ToolCall]:
    """Read calls as Qwen3-Coder and Qwen3.5 write them: <function=NAME> with <parameter=NAME> between <tool_call> tags.

    >>> parse_qwen3_coder("<tool_call><function=f><parameter=a>\\n1\\n</parameter></function></tool_call>")[0].arguments
    {'a': '1'}
    """
    return [_from_tags(found, _FUNCTION, _PARAMETER) for found in _HERMES.finditer(text)]


@PARSERS.register("glm")
def parse_glm(text: str) -> list[ToolCall]:
    """Read calls as GLM-4.5 and later write them: a name, then <arg_key> and <arg_value>, between <tool_call> tags.

    >>> parse_glm("<tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>")[0].arguments
    {'a': '1'}
    """
    return [_from_tags(found, _GLM_FUNCTION, _GLM_PARAMETER) for found in _HERMES.finditer(text)]


@PARSERS.register("llama")
def parse_llama(text: str) -> list[ToolCall]:
    """Read calls as Llama 3 writes them: a turn that is JSON with name and parameters, or several joined by semicolons.

    >>> parse_llama('{"name": "add", "parameters": {"a": 1}}')[0].name
    'add'
    """
    text = text.strip().removeprefix("<|python_tag|>").strip()
    decoder, calls = json.JSONDecoder(), list[ToolCall]()
    while text.startswith("{"):
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return [*calls, _from_json(text)]
        rest = text[end:].lstrip("; \n")
        calls.append(replace(_from_json(text[:end]), source=text.removesuffix(rest)))
        text = rest
    return calls


@PARSERS.register("harmony")
def parse_harmony(text: str) -> list[ToolCall]:
    """Read calls as gpt-oss writes them: messages to functions.NAME, whose text is the arguments as JSON.

    >>> parse_harmony('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}')[0].arguments
    {'a': 1}
    """
    calls = [each for each in read_channels(text) if each.tool]
    bodies = [json.dumps({"name": each.tool, "arguments": each.text}) for each in calls]
    return [replace(_from_json(body), source=each.source) for body, each in zip(bodies, calls, strict=True)]


@PARSERS.register("python")
def parse_python(text: str) -> list[ToolCall]:
    """Read each fenced block of Python as a call of the tool `python` with the argument `code`.

    >>> parse_python("so\\n```python\\nprint(2)\\n```")[0].arguments
    {'code': 'print(2)\\n'}
    """
    return [ToolCall(name="python", arguments={"code": f[1]}, source=f[0]) for f in _FENCED.finditer(text)]


def pattern_parser(patterns: Mapping[str, str]) -> Parser:
    """Return a parser that reads a turn as a call of the first tool whose regular expression the whole turn matches.

    patterns: by tool, an expression whose named groups are the arguments, as texts.

    >>> pattern_parser({"calc": r"calc (?P<expression>.+)"})("calc 2*3")[0].arguments
    {'expression': '2*3'}
    """
    compiled = {name: re.compile(pattern, re.DOTALL) for name, pattern in patterns.items()}

    def parse(text: str) -> list[ToolCall]:
        for name, pattern in compiled.items():
            if found := pattern.fullmatch(text.strip()):
                return [ToolCall(name=name, arguments=found.groupdict(), source=text)]
        return []

    return parse


def read_calls(parse: Parser, text: str, schemas: Callable[[], Sequence[Mapping[str, object]]]) -> list[ToolCall]:
    """Return the calls of a turn, with arguments of the types that the schemas of the tools name.

    schemas: returns those in OpenAI's form. An argument that they do not know, or that is not what they say, is text.
    """
    calls = list(parse(text))
    if not any(call.is_text for call in calls):
        return calls
    described = [function for schema in schemas() if isinstance(function := schema.get("function"), Mapping)]
    functions = {str(function.get("name")): function for function in described}
    return [_typed(call, functions.get(call.name, {})) if call.is_text else call for call in calls]


def _typed(call: ToolCall, function: Mapping[str, Any]) -> ToolCall:
    properties, read = (function.get("parameters") or {}).get("properties") or {}, dict(call.arguments)
    for name, value in call.arguments.items():
        schema = properties.get(name) or {}
        kinds = {str(each.get("type")) for each in (schema, *schema.get("anyOf", ())) if isinstance(each, Mapping)}
        if kinds - {"None"} and "string" not in kinds:
            with contextlib.suppress(ValueError, RecursionError):
                read[name] = json.loads(value)
    return replace(call, arguments=read)


def _from_tags(found: re.Match[str], function: re.Pattern[str], parameter: re.Pattern[str]) -> ToolCall:
    """Read one call from tags; its arguments are texts."""
    said = "this is no call, expected a function and its parameters, each between its tags"
    body = function.fullmatch(found[1].strip())
    read, end = dict[str, str](), 0
    # Each is read where the last one ended, so that a long turn is read once.
    while body is not None and (next_one := parameter.match(body[2], end)) is not None:
        read[next_one[1].strip()], end = next_one[2].removeprefix("\n").removesuffix("\n"), next_one.end()
    if body is None or body[2][end:].strip():
        return ToolCall(arguments={}, error=said, source=found[0])
    return ToolCall(name=body[1].strip(), arguments=read, source=found[0], is_text=True)


def _from_json(body: str) -> ToolCall:
    """Read one call from JSON; `arguments` may be called `parameters`, and be JSON in a text."""
    try:
        call = json.loads(body)
        arguments = call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        name = call["name"]
        if isinstance(name, str):
            # Half a character, which JSON can spell, would be no name for whoever passes it on.
            name.encode()
    except (ValueError, AttributeError, KeyError, RecursionError) as error:
        return ToolCall(arguments={}, error=f"this is no call, expected JSON with name and arguments: {error!r}")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return ToolCall(arguments={}, error="this is no call, expected name as a text and arguments as an object")
    return ToolCall(name=name, arguments=arguments)
