"""Let the policy call tools: functions whose results it reads before its next turn."""

import asyncio
import functools
import inspect
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.config.environments import EnvironmentConfig
from megarl.data.images import read_parts, shows_image
from megarl.data.turns import InterTurnTokens
from megarl.environments.base import (
    ENVIRONMENTS,
    MOST_REPLY_CHARS,
    Action,
    Environment,
    Reply,
    load_object,
    open_environments,
)
from megarl.environments.calls import LateError, attempt, contained, describe, in_thread, message_of
from megarl.environments.parsers import PARSERS, ToolCall, pattern_parser, read_calls
from megarl.errors import ConfigError, WorkerError
from megarl.types import Message, Prompt
from megarl.types.turns import IMAGE_MARK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


KEY = "environment.entries.*.arguments"
# A turn with more calls is one that repeats itself, and gets one error instead of thousands.
MOST_CALLS = 64


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
        side_by_side: Sequence[str] = (),
        parser: str = "hermes",
        patterns: Mapping[str, str] | None = None,
        in_prompt: bool = True,
        timeout_s: float = 30.0,
        max_result_chars: int = 4096,
    ) -> None:
        """Make the environment of one sample.

        tools: functions, or their names as MODULE:FUNCTION or FILE.py:FUNCTION; async ones are awaited, others run in a
        thread. side_by_side: names of tools whose calls in one turn need not wait for one another, as all others do.
        parser: how calls are written, a name in PARSERS. patterns: instead of a parser, for each tool a regular
        expression that a whole turn matches. in_prompt: whether the chat template tells the policy of the tools.
        timeout_s: of a call. max_result_chars: longer results are cut in the middle.
        """
        self._functions = {f.__name__: f for f in (load_object(t, KEY) if isinstance(t, str) else t for t in tools)}
        self._side_by_side = set(side_by_side)
        self._parse = PARSERS.get(parser) if patterns is None else pattern_parser(patterns)
        for name in patterns or {}:
            if name not in self._functions:
                raise ConfigError(f"{KEY}.patterns: {name} is not among the tools {sorted(self._functions)}")
        self._in_prompt, self._timeout_s, self._max_result_chars = in_prompt, timeout_s, max_result_chars

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:  # type: ignore[override]
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
        calls = [] if action.is_cut else read_calls(self._parse, action.text, lambda: self.tools)
        if not calls:
            return await self.answer(action)
        if len(calls) > MOST_CALLS:
            said = f"error: this turn has {len(calls)} calls, expected at most {MOST_CALLS}; none of them was made"
            message, found = Message(role="tool", content=said), {"tool_errors": len(calls)}
            return Reply(messages=(message,), details=found, warnings=(0,))
        results = list[tuple[Message, bool]]()
        for is_free, group in itertools.groupby(calls, lambda call: call.name in self._side_by_side):
            if is_free:
                results += await asyncio.gather(*map(self._run, group))
            else:
                results += [await self._run(call) for call in group]
        # Together they stay well below what a reply may have.
        most = MOST_REPLY_CHARS // (2 * len(calls))
        messages = tuple(_cut(said, most) for said, _ in results)
        failed = [i for i, (_, is_error) in enumerate(results) if is_error]
        return Reply(messages=messages, num_calls=len(calls), details={"tool_errors": len(failed)}, warnings=failed)

    async def answer(self, action: Action) -> Reply:
        """Reply to a turn without calls: the conversation ends. A subclass may reward it, or go on."""
        return Reply(done=True)

    async def resume(self, prompt: Prompt, actions: Sequence[Action]) -> bool:
        return True

    async def _run(self, call: ToolCall) -> tuple[Message, bool]:
        """Return what a call gives the policy to read, and whether that is an error."""
        if call.error:
            return self._written(f"error: {call.error}"), True
        if call.name not in self._functions:
            known = ", ".join(self._functions)
            return self._written(f"error: there is no tool {call.name!r}; there are: {known}"), True
        try:
            return await contained(self._result_of(self._functions[call.name], call.arguments)), False
        except LateError as error:
            return self._written(f"error: {call.name} {error}"), True
        except (ConfigError, WorkerError):
            # The policy cannot mend what is wrong with the run.
            raise
        except ToolError as error:
            return self._written(message_of(error)), True
        except Exception as error:
            return self._written(f"error: {describe(error)}"), True

    async def _result_of(self, function: Callable[..., Any], arguments: Mapping[str, object]) -> Message:
        """Return what a function returns as a message. Raises LateError, or what the function raises."""

        @functools.wraps(function)
        def call() -> object:
            result = function(**arguments)
            return result if inspect.isawaitable(result) else self._written(result)

        # A function that does not look async may be so, as one with a decorator.
        is_async = inspect.iscoroutinefunction(function)
        result = call() if is_async else await in_thread(call, timeout_s=self._timeout_s)
        if inspect.isawaitable(result):
            return self._written(await attempt(lambda: result, self._timeout_s))
        assert isinstance(result, Message), "a result is written in its thread"
        return result

    def _written(self, result: object) -> Message:
        """Return a result as a message within the limit: parts with images as such, anything else as text.

        Raises TypeError or ValueError if JSON cannot hold it, and DataError for an image that cannot be read.
        """
        if self.read_image is not None and isinstance(result, list) and any(map(shows_image, result)):
            text, images = read_parts(result, self.read_image)
            return _cut(Message(role="tool", content=text, images=images), self._max_result_chars)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError(f"the tool returned a {type(result).__name__}, expected a text or what JSON can hold")
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        return _cut(Message(role="tool", content=text), self._max_result_chars)


def _cut(message: Message, most: int) -> Message:
    """Leave out the middle of texts that are too long, and no image."""
    texts = message.content.split(IMAGE_MARK) if message.images else [message.content]
    return replace(message, content=IMAGE_MARK.join(without_middle(text, most // len(texts)) for text in texts))


def without_middle(text: str, most: int) -> str:
    """Return a text, of which the middle is left out if it has more characters than `most`."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def check_replies(cfg: EnvironmentConfig, names: Collection[str], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Check that the chat template renders what the environments `names` of rows reply, results of tools included.

    Raises ConfigError or DataError if it does not.
    """
    if not names:
        return
    inter_turn = InterTurnTokens(tokenizer)
    makers = open_environments(cfg, sorted(names)).values()
    if any(isinstance(maker.made_in_time(), ToolEnvironment) for maker in makers):
        inter_turn.require_reply(cfg.tool_role)
