"""Keep the chats of an agent: its requests, the replies to them, and the turn that each request continues.

The policy's tokens never pass here, only their text: what an agent sends back of earlier turns is compared with them,
and not tokenised again.
"""

import asyncio
import contextlib
import fnmatch
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from megarl.data.harmony import read_channels
from megarl.data.thoughts import split_thought
from megarl.environments.base import Action, SideRequest, TokenCounter
from megarl.environments.chat_requests import (
    MessageReader,
    Repeated,
    RequestError,
    Said,
    before_stop,
    read_message,
    read_stop,
    refuse_fields,
)
from megarl.environments.message_tree import MessageTree
from megarl.environments.parsers import Parser, read_calls
from megarl.host.clock import awake_s
from megarl.host.unicode import readable
from megarl.types import Message

# Requests that come within this many seconds are answered at the same time; after turns that took long to write, within
# this share of their time, if as many chats may go on as that.
GATHER_S, GATHER_SHARE = 0.005, 0.1
Tools: TypeAlias = Sequence[Mapping[str, object]]


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request that waits for the policy, with the whole chat that it sent.

    may_call: whether a call of a tool in the answer is one, or text. stop: texts at which the answer ends. is_gone:
    whether its client has left. id_prefix, has_thoughts: as its dialect wants them. after_turn: the turn after which it
    goes on, if there is one; num_known: how many of its messages lead to that turn's answer.
    """

    said: list[Said]
    tools: Tools
    may_call: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    num_tries: int
    model: str
    answer: asyncio.Future[dict[str, Any]]
    is_gone: Callable[[], Awaitable[bool]]
    id_prefix: str
    has_thoughts: bool
    num_known: int = 0
    after_turn: int | None = None


class Chat:
    """The chats of one sample, between the HTTP requests of its agent and the environment that has the policy's turns.

    Requests that come together are answered together. One that has all messages of an earlier one, its answer and new
    messages goes on with that chat. Any other begins a chat of its own: a history that was rewritten or made shorter, a
    sub-agent's, the same question once more. Messages that chats share are kept once, as a tree.

    turns: by the id of each completion, the turns that are its choices.
    stored: by such an id, how many messages before its chat were instructions, where clients may go on by it alone.
    branches: how many requests began a chat of their own, by the cause. num_refused: requests that were not answered.
    """

    def __init__(self, parse: Parser | None, untrained_models: Sequence[str] = ()) -> None:
        """Begin without chats; `parse` finds the policy's calls of tools, if any are looked for.

        untrained_models: turns that are asked for by such a name, as patterns with *, do not train.
        """
        self.key = secrets.token_urlsafe(16)
        self._parse, self._untrained_models = parse, untrained_models
        # Places in the tree of answered requests, and of answers with their turns and tools.
        self._tree = MessageTree()
        self._questions: set[int] = set()
        self._answered: dict[int, list[tuple[int, Tools]]] = {}
        self._tools: list[Tools] = []
        # The text of an answered turn, by the message that was sent.
        self._texts: dict[Said, str] = {}
        self.messages, self.translated = MessageReader(), Repeated[list[dict[str, object]]]()
        self.turns: dict[str, list[int]] = {}
        self.stored: dict[str, int] = {}
        # By the id of each completion, the place of its request, and its answer with the ids of its calls.
        self._ends: dict[str, tuple[int, Said]] = {}
        self.branches, self.num_refused = Counter[str](), 0
        self.count_tokens: TokenCounter | None = None
        self.read_image: Callable[[object], str] | None = None
        # Requests that wait for the policy, and those that it answers now, since when.
        self._waiting: list[_Request] = []
        self._asked: list[_Request] = []
        self._began = 0.0
        self._arrived = asyncio.Event()
        # By turn, how many requests its answer may bring; how many may come together, and how long they are waited for.
        self._weights: dict[int, int] = {}
        self._num_expected, self._patience_s, self._gather_until = 0, GATHER_S, math.inf
        self._is_closed = self._has_ended = False

    def end(self) -> None:
        """Note that the agent has ended, and asks for nothing more."""
        self._has_ended = True
        self._arrived.set()

    async def next_questions(self) -> list[SideRequest]:
        """Wait for the agent to ask for turns, and return all that it asks for together, in an order of their own; none
        if it ends first.

        How soon each arrived makes no difference to it.
        """
        while not self._is_gathered():
            if self._has_ended:
                return []
            self._arrived.clear()
            left_s = self._gather_until - awake_s() if self._waiting else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), left_s)
        self._asked, self._waiting = sorted(self._waiting, key=self._order), []
        self._began = awake_s()
        return [self._question(each) for each in self._asked]

    def _is_gathered(self) -> bool:
        """Return whether as many requests wait as may come together, or the time for it is over."""
        if not self._waiting:
            return False
        for each in self._waiting:
            each.num_known, each.after_turn = self._known_turn(each)
        if not math.isfinite(self._gather_until):
            self._gather_until = awake_s() + (self._patience_s if self._num_expected > 1 else GATHER_S)
        is_new = any(each.after_turn is None for each in self._waiting)
        # A chat that goes on after calls of sub-agents does so in their place.
        num_come = sum(1 if each.after_turn is None else self._weights[each.after_turn] for each in self._waiting)
        is_whole = num_come >= self._num_expected and (self._num_expected > 1 or not is_new)
        return is_whole or awake_s() >= self._gather_until

    def _order(self, asked: _Request) -> tuple[object, ...]:
        after, said = asked.after_turn, [(each.role, each.text, each.images, each.calls) for each in asked.said]
        limits = (asked.num_tries, asked.max_tokens or 0, asked.stop, asked.model)
        return (math.inf if after is None else after, said, self._tools.index(asked.tools), *limits)

    def _known_turn(self, asked: _Request) -> tuple[int, int | None]:
        """Return after which turn a request goes on, and how many messages lead to its answer; 0 and None: no turn."""
        num_known = max((i for i, each in enumerate(asked.said, 1) if each.role == "assistant"), default=0)
        places = self._tree.known(asked.said[:num_known])
        if len(places) > num_known > 0:
            turns = [turn for turn, tools in self._answered.get(places[-1], ()) if tools is asked.tools]
            return (num_known, turns[-1]) if turns else (0, None)
        return 0, None

    def _question(self, asked: _Request) -> SideRequest:
        messages, goes_on = self._messages(asked.said[asked.num_known :]), asked.after_turn is not None
        return SideRequest(
            messages=messages if goes_on else (),
            after_turn=asked.after_turn,
            context=() if goes_on else messages,
            tools=asked.tools,
            max_turn_tokens=asked.max_tokens,
            stop=asked.stop,
            num_tries=asked.num_tries,
            trains=not any(fnmatch.fnmatchcase(asked.model, each) for each in self._untrained_models),
        )

    def _cause(self, asked: _Request) -> str:
        """Return why a request goes on from no earlier one: the same was asked before, its tools differ, it begins in
        another way, or messages within were changed or left out.
        """
        places = self._tree.known(asked.said)
        if len(places) > len(asked.said) and places[-1] in self._questions:
            return "asked_again"
        if any(place in self._answered for place in places):
            return "other_tools"
        return "rewritten" if len(places) > 1 else "other_beginning"

    def _messages(self, said: Sequence[Said]) -> tuple[Message, ...]:
        """Return messages as the policy reads them, its own turns as it wrote them."""
        roles = {"developer": "system"}
        return tuple(
            Message(role=roles.get(each.role, each.role), content=self._texts.get(each, each.text), images=each.images)
            for each in said
        )

    def answer(self, actions: Sequence[Action]) -> int:
        """Answer the agent's requests with all turns of the policy; return the number of tools that they call."""
        assert self._asked, "the policy speaks when it is asked"
        rest, asked, num_calls, num_expected = list(actions), self._asked, 0, 0
        while asked and rest:
            first, *asked = asked
            own, rest = rest[: first.num_tries], rest[first.num_tries :]
            if first.after_turn is None and self._answered:
                self.branches[self._cause(first)] += 1
            called = self._answer(first, own)
            num_calls += called
            # Each call may be a sub-agent's; a chat with tools has ended with a turn that calls none.
            weight = max(called, not first.tools)
            self._weights |= dict.fromkeys((action.turn for action in own), weight)
            num_expected += weight
        self._asked, self._waiting = [], [*asked, *self._waiting]
        self._num_expected = num_expected + len(self._waiting)
        self._patience_s = max(GATHER_S, GATHER_SHARE * (awake_s() - self._began))
        self._gather_until = math.inf
        return num_calls

    def _answer(self, asked: _Request, actions: Sequence[Action]) -> int:
        """Answer a request with all tries of a turn; return the number of tools that they call."""
        place = 0
        for each in asked.said:
            place = self._tree.add(each, place)
        self._questions.add(place)
        name = asked.id_prefix + secrets.token_hex(8)
        choices = [self._choice(asked, place, index, action, name) for index, action in enumerate(actions)]
        num_before, num_written = actions[0].num_before, sum(action.num_tokens for action in actions)
        usage = {"prompt_tokens": num_before, "completion_tokens": num_written}
        completion = {
            "id": name,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": readable(asked.model),
            "choices": choices,
            "usage": usage | {"total_tokens": num_before + num_written},
        }
        self.turns[name] = [action.turn for action in actions]
        # The client may have gone.
        if not asked.answer.done():
            asked.answer.set_result(completion)
        return sum(len(choice["message"].get("tool_calls", ())) for choice in choices)

    def _choice(self, asked: _Request, place: int, index: int, action: Action, name: str) -> dict[str, Any]:
        """Return a turn of the policy as a choice of the completion `name`, and remember what it answered."""
        calls, (content, stop) = [], before_stop(action.text, asked.stop)
        is_cut = action.is_cut and stop is None
        if self._parse and asked.may_call and not is_cut:
            calls = read_calls(self._parse, content, lambda: asked.tools)
        try:
            functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        except (ValueError, RecursionError):
            functions = []
        if not functions or any(call.error for call in calls):
            calls = []  # One that cannot be read or sent is none; the agent gets the text.
        for call in calls:
            content = content.replace(call.source, "", 1)
        thought, content = split_thought(content) if asked.has_thoughts or read_channels(content) else ("", content)
        message: dict[str, Any] = {"role": "assistant", "content": content.strip() or None if calls else content}
        if thought:
            message["reasoning"] = thought
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{action.turn}_{i}", "type": "function", "function": function}
                for i, function in enumerate(functions)
            ]
        answer = read_message(message, "the answer")
        self._ends[name] = place, answer
        self._answered.setdefault(self._tree.add(answer, place), []).append((action.turn, asked.tools))
        if content != action.text:
            self._texts[answer] = action.text
        if calls:
            self.messages.calling[answer.call_ids] = answer
        reason = "tool_calls" if calls else "length" if is_cut else "stop"
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": stop}

    async def ask(
        self,
        body: Mapping[str, Any],
        is_gone: Callable[[], Awaitable[bool]],
        *,
        id_prefix: str = "chatcmpl-",
        has_thoughts: bool = False,
    ) -> dict[str, Any]:
        """Return the completion of a request. Raises RequestError, also when the sample ends before it is answered.

        is_gone: tells whether the client still waits for it. id_prefix: the beginning of the completion's id.
        has_thoughts: the thought with which an answer begins is not part of its text.
        """
        (said, tools), stop = self._read(body), read_stop(body)
        if said[-1].role == "assistant":
            raise RequestError("the last message is the assistant's, expected one that the policy answers")
        for i, each in enumerate(said):
            if each.calls and each not in self._texts:
                raise RequestError(
                    f"messages[{i}] has tool_calls that the policy did not write, expected text; write it out"
                )
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        num_tries = body.get("n") or 1
        limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
        for waiting in [*self._asked, *self._waiting]:
            # A client that gave up waiting asks again: that is not a further turn.
            is_same = (waiting.said, waiting.tools, waiting.num_tries) == (said, tools, num_tries)
            if is_same and await waiting.is_gone():
                waiting.answer.cancel()
                waiting.answer, waiting.is_gone = answer, is_gone
                return await answer
        if not any(each is tools for each in self._tools):
            self._tools.append(tools)
        limit, may_call = min(limits, default=None), bool(tools) and body.get("tool_choice") != "none"
        self._waiting.append(
            _Request(
                said=said,
                tools=tools,
                may_call=may_call,
                max_tokens=limit,
                stop=stop,
                num_tries=num_tries,
                model=str(body.get("model", "policy")),
                answer=answer,
                is_gone=is_gone,
                id_prefix=id_prefix,
                has_thoughts=has_thoughts,
            )
        )
        self._arrived.set()
        return await answer

    def before(self, name: str) -> list[Said]:
        """Return the messages up to a stored completion, without the instructions of its request."""
        place, answer = self._ends[name]
        return [*self._tree.chat_to(place)[self.stored[name] :], answer]

    def num_tokens(self, body: Mapping[str, Any]) -> int:
        """Count the tokens of a request's messages and tools. Raises RequestError as `ask` does."""
        said, tools = self._read(body)
        assert self.count_tokens is not None, "a worker has the conversation"
        return self.count_tokens(self._messages(said), tools)

    def _read(self, body: Mapping[str, Any]) -> tuple[list[Said], Tools]:
        """Return the messages and tools of a request. Raises RequestError for what cannot be honoured."""
        if self._is_closed:
            raise RequestError("the conversation has ended")
        refuse_fields(body)
        said, tools = self.messages.read(body.get("messages"), self.read_image), body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError(f"tools is {str(tools)[:80]}, expected a list of objects")
        return said, next((each for each in self._tools if each == tools), tools)

    def close(self) -> None:
        """End all chats: who still waits for an answer gets none."""
        self._is_closed = True
        for waiting in [*self._asked, *self._waiting]:
            if not waiting.answer.done():
                waiting.answer.set_exception(RequestError("the conversation has ended"))
