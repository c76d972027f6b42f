"""Let the policy call tools: functions whose results it reads before its next turn."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.environments.base import ENVIRONMENTS, Action, Environment, Reply, load_object
from megarl.environments.parsers import PARSERS, ToolCall, pattern_parser
from megarl.errors import ConfigError, WorkerError
from megarl.types import Message, Prompt

KEY = "environment.entries.*.arguments"


class ToolError(Exception):
    """The error of a tool that says itself what the policy is to read."""


@ENVIRONMENTS.register("tools")
class ToolEnvironment(Environment):
    """An environment in which the policy calls tools; a turn without a call ends the conversation.

    A tool that raises, is late or unknown does not spoil the sample: the reply says so, and the policy may react. Its
    tools keep no state, so a conversation can go on after a resume; a subclass whose tools do overrides `resume`.
    """

    def __init__(
        self,
        *,
        tools: Sequence[str | Callable[..., Any]] = (),
        parser: str = "hermes",
        patterns: Mapping[str, str] | None = None,
        in_prompt: bool = True,
        timeout_s: float = 30.0,
        max_result_chars: int = 4096,
    ) -> None:
        """Make the environment of one sample.

        tools: functions, or their names as MODULE:FUNCTION or FILE.py:FUNCTION; async ones are awaited, others run in a
        thread. parser: how calls are written, `hermes`, `llama` or `python`. patterns: instead of a parser, for each
        tool a regular expression that a whole turn matches. in_prompt: whether the chat template tells the policy of
        the tools. timeout_s: of a call. max_result_chars: longer results are cut in the middle.
        """
        self._functions = {f.__name__: f for f in (load_object(t, KEY) if isinstance(t, str) else t for t in tools)}
        self._parse = PARSERS.get(parser) if patterns is None else pattern_parser(patterns)
        for name in patterns or {}:
            if name not in self._functions:
                raise ConfigError(f"{KEY}.patterns: {name} is not among the tools {sorted(self._functions)}")
        self._in_prompt, self._timeout_s, self._max_result_chars = in_prompt, timeout_s, max_result_chars

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """Return the schemas of the tools, made from signatures and docstrings; ConfigError for one without them."""
        if not self._in_prompt:
            return ()
        from transformers.utils import get_json_schema

        schemas = []
        for function in self._functions.values():
            try:
                schemas.append(get_json_schema(function))
            except Exception as error:
                raise ConfigError(
                    f"{KEY}.tools: no schema can be made of {function.__name__}: {error}; give it type hints and a "
                    "docstring with a section Args, or set in_prompt to false"
                ) from error
        return schemas

    async def reply(self, action: Action) -> Reply:
        calls = [] if action.is_cut else self._parse(action.text)
        if not calls:
            return self.answer(action)
        results = await asyncio.gather(*(self._run(call) for call in calls))
        messages = tuple(Message(role="tool", content=result) for result, _ in results)
        num_errors = sum(is_error for _, is_error in results)
        return Reply(messages=messages, num_calls=len(calls), details={"tool_errors": num_errors})

    def answer(self, action: Action) -> Reply:
        """Reply to a turn without calls: the conversation ends. A subclass may reward it, or go on."""
        return Reply(done=True)

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        return True

    async def _run(self, call: ToolCall) -> tuple[str, bool]:
        """Return what a call gives the policy to read, and whether that is an error."""
        if call.error:
            return f"error: {call.error}", True
        if call.name not in self._functions:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self._functions)}", True
        function = self._functions[call.name]
        try:
            running = (
                function(**call.arguments)
                if inspect.iscoroutinefunction(function)
                else asyncio.to_thread(function, **call.arguments)
            )
            result = await asyncio.wait_for(running, self._timeout_s)
        except TimeoutError:
            return f"error: {call.name} took longer than {self._timeout_s:g} s", True
        except (ConfigError, WorkerError):
            # What is wrong with the run is not the policy's to mend.
            raise
        except ToolError as error:
            return self._cut(str(error)), True
        except Exception as error:
            return self._cut(f"error: {type(error).__name__}: {error}"), True
        return self._cut(result if isinstance(result, str) else json.dumps(result, default=str)), False

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_result_chars:
            return text
        half = self._max_result_chars // 2
        return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
