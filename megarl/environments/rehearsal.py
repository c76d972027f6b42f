"""Play one conversation with an environment by a script, without a model, to find mistakes in users' environments."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from megarl.environments.base import MOST_REPLY_CHARS, Action, Environment, Reply
from megarl.environments.images import ReplyImages
from megarl.errors import DataError, RehearsalError
from megarl.types import Message, Prompt

T = TypeVar("T")
Schemas: TypeAlias = Sequence[Mapping[str, object]]

# Turns after which the script leaves.
_MOST_TURNS = 4
_EXAMPLES: dict[str, object] = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


async def play(
    make: Callable[[], Environment], prompt: Prompt, *, max_turns: int, reply_s: float, images: ReplyImages
) -> Schemas:
    """Let an environment start, reply to calls of its tools and to plain answers, and close; return its tools.

    images: what keeps those that it shows. Raises RehearsalError for a result that a run could not use, and whatever
    the environment raises.
    """
    environment = make()
    environment.read_image = images.read
    try:
        _require_messages(await _in_time(environment.start(prompt), reply_s, "start"), "start", images)
        for turn, text in zip(range(min(max_turns, _MOST_TURNS)), _script(environment), strict=False):
            actions = [
                Action(text=text, turn=turn + i, num_tokens=1, num_before=turn)
                for i in range(environment.num_tries + sum(each.num_tries for each in environment.beside))
            ]
            if len(actions) == 1:
                said = await _in_time(environment.reply(actions[0]), reply_s, "reply")
            else:
                said = await _in_time(environment.choose(actions), reply_s, "choose")
            _require_reply(said, images)
            if said.done:
                break
        return environment.tools
    finally:
        await _in_time(environment.close(), reply_s, "close")


async def _in_time(call: Awaitable[T], reply_s: float, name: str) -> T:
    if not hasattr(call, "__await__"):
        raise RehearsalError(f"{name} returned {call!r:.80} at once, expected a coroutine; define it by async def")
    try:
        return await asyncio.wait_for(call, reply_s)
    except TimeoutError:
        raise RehearsalError(
            f"{name} did not return within environment.reply_timeout_s={reply_s:g}; look into what it waits for"
        ) from None


def _script(environment: Environment) -> Iterator[str]:
    """Yield turns of a policy: a call of each tool with arguments of the right types, then plain answers."""
    for tool in environment.tools:
        function: Any = tool.get("function", tool)
        properties = function.get("parameters", {}).get("properties", {})
        arguments = {
            name: each["enum"][0] if each.get("enum") else _EXAMPLES.get(str(each.get("type")), "1")
            for name, each in properties.items()
        }
        yield f"<tool_call>\n{json.dumps({'name': function.get('name'), 'arguments': arguments})}\n</tool_call>"
    while True:
        yield "The answer is 1."


def _require_reply(said: object, images: ReplyImages) -> None:
    if not isinstance(said, Reply):
        raise RehearsalError(f"the reply has type {type(said).__name__}, expected Reply; return one")
    messages = said.context or said.messages
    _require_messages(messages, "the reply", images)
    if not messages and not said.done:
        raise RehearsalError("the reply has no messages, and does not end the conversation; set done=True")
    for reward in (said.reward, *said.rewards.values()):
        if not isinstance(reward, int | float) and not hasattr(reward, "__float__"):
            raise RehearsalError(f"the reward is {reward!r:.80}, expected a number; return one")
        if not math.isfinite(float(reward)):
            raise RehearsalError(f"the reward is {float(reward)}, expected a finite number; correct it")


def _require_messages(messages: Sequence[object], what: str, images: ReplyImages) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RehearsalError(f"the messages of {what} have type {type(messages).__name__}, expected a tuple of Message")
    for each in messages:
        if not isinstance(each, Message) or not isinstance(each.content, str):
            raise RehearsalError(f"{what} has the message {each!r:.80}, expected a Message of role and text")
        try:
            images.kept(each)
        except (ValueError, DataError) as error:
            raise RehearsalError(f"{what}: {error}") from error
    if sum(len(each.content) for each in messages if isinstance(each, Message)) > MOST_REPLY_CHARS:
        raise RehearsalError(f"{what} has more than {MOST_REPLY_CHARS} characters; shorten its messages")
