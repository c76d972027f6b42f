"""Keep the chats of an agent: its requests, the replies to them, and the turn that each request continues.

The policy's tokens never pass here, only their text: what an agent sends back of earlier turns is compared with them,
and not tokenised again.
"""

import asyncio
import json
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.thoughts import split_thought
from megarl.environments.base import Action, TokenCounter
from megarl.environments.chat_requests import RequestError, Said, in_order_of_calls, read_message, refuse_fields
from megarl.environments.parsers import Parser, read_calls
from megarl.host.unicode import readable
from megarl.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAsked:
    """A request for a turn of the policy.

    after_turn: the number of the turn that the messages follow; None: they are all that the policy reads. max_tokens:
    the limit of the turn, if the request has one. num_tries: how many answers it asks for. model: the name by which it
    asks for the policy.
    """

    messages: tuple[Message, ...]
    after_turn: int | None
    tools: Sequence[Mapping[str, object]]
    max_tokens: int | None
    num_tries: int
    model: str


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request that waits for the policy, with the whole chat that it sent.

    may_call: whether a call of a tool in the answer is one, or text. is_gone: whether its client has left. id_prefix,
    has_thoughts: as its dialect wants them.
    """

    said: list[Said]
    tools: Sequence[Mapping[str, object]]
    may_call: bool
    max_tokens: int | None
    num_tries: int
    model: str
    answer: asyncio.Future[dict[str, Any]]
    is_gone: Callable[[], Awaitable[bool]]
    id_prefix: str
    has_thoughts: bool


class Chat:
    """The chats of one sample, between the HTTP requests of its agent and the environment that has the policy's turns.

    Requests are answered one after the other. One that has all messages of an earlier one, its answer and new messages
    goes on with that chat. Any other begins a chat of its own: a history that was rewritten or made shorter, a
    sub-agent's, the same question once more. turns: by the id of each completion, the turns that are its choices.
    histories: by such an id, all messages up to the completion, where clients may go on from it by the id alone.
    branches: how many requests began a chat of their own, by the cause. num_refused: requests that were not answered.
    changed: the calls of answers that came back with other arguments, by their ids.
    """

    def __init__(self, parse: Parser | None) -> None:
        """Begin without chats; `parse` finds the policy's calls of tools, if any are looked for."""
        self.key = secrets.token_urlsafe(16)
        self._parse = parse
        # The messages up to the answer, and the tools, of each answered turn. Its text, by the message that was sent.
        self._answered: list[tuple[list[Said], Sequence[Mapping[str, object]]]] = []
        self._texts: dict[Said, str] = {}
        # The answers with calls, by the ids of these.
        self._calling: dict[tuple[str, ...], Said] = {}
        self.turns: dict[str, list[int]] = {}
        self.histories: dict[str, Sequence[Mapping[str, Any]]] = {}
        self.branches, self.num_refused, self.changed = Counter[str](), 0, set[tuple[str, ...]]()
        self.count_tokens: TokenCounter | None = None
        self._waiting: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        # The request that the policy answers now.
        self._asked: _Request | None = None
        self._is_closed = False

    async def next_request(self) -> TurnAsked:
        """Wait for the agent to ask for a turn."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        asked = self._asked = self._waiting.popleft()
        count, after_turn = 0, None
        for turn, (said, tools) in enumerate(self._answered):
            goes_on = len(asked.said) > len(said) and asked.said[: len(said)] == said and asked.tools == tools
            if goes_on and not any(each.role == "assistant" for each in asked.said[len(said) :]):
                count, after_turn = len(said), turn
        if after_turn is None and self._answered:
            self.branches[self._cause(asked)] += 1
        return TurnAsked(
            messages=self._messages(asked.said[count:]),
            after_turn=after_turn,
            tools=asked.tools,
            max_tokens=asked.max_tokens,
            num_tries=asked.num_tries,
            model=asked.model,
        )

    def _cause(self, asked: _Request) -> str:
        """Return why a request goes on from no earlier one: the same was asked before, its tools differ, it begins in
        another way, or messages within were changed or left out.
        """
        questions = [said[:-1] for said, _ in self._answered]
        if any(asked.said == question for question in questions):
            return "asked_again"
        if any(asked.said[: len(said)] == said for said, _ in self._answered):
            return "other_tools"
        return "rewritten" if any(asked.said[0] == question[0] for question in questions) else "other_beginning"

    def _messages(self, said: Sequence[Said]) -> tuple[Message, ...]:
        """Return messages as the policy reads them, its own turns as it wrote them."""
        roles = {"developer": "system"}
        return tuple(
            Message(role=roles.get(each.role, each.role), content=self._texts.get(each, each.text)) for each in said
        )

    def answer(self, actions: Sequence[Action]) -> int:
        """Answer the agent's request with all tries of the policy's turn; return the number of tools that they call."""
        assert self._asked is not None, "the policy speaks when it is asked"
        asked, self._asked = self._asked, None
        choices = [self._choice(asked, index, action) for index, action in enumerate(actions)]
        num_before, num_written = actions[0].num_before, sum(action.num_tokens for action in actions)
        usage = {"prompt_tokens": num_before, "completion_tokens": num_written}
        name = asked.id_prefix + secrets.token_hex(8)
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

    def _choice(self, asked: _Request, index: int, action: Action) -> dict[str, Any]:
        """Return a turn of the policy as a choice of a completion, and remember what it answered."""
        calls = []
        if self._parse and asked.may_call and not action.is_cut:
            calls = read_calls(self._parse, action.text, lambda: asked.tools)
        try:
            functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        except (ValueError, RecursionError):
            functions = []
        if not functions or any(call.error for call in calls):
            # A call that cannot be read or sent is none; the agent gets the text.
            calls = []
        content = action.text
        for call in calls:
            content = content.replace(call.source, "", 1)
        thought, content = split_thought(content) if asked.has_thoughts else ("", content)
        message: dict[str, Any] = {"role": "assistant", "content": content.strip() or None if calls else content}
        if thought:
            message["reasoning"] = thought
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{action.turn}_{i}", "type": "function", "function": function}
                for i, function in enumerate(functions)
            ]
        answer = read_message(message, "the answer")
        self._answered.append(([*asked.said, answer], asked.tools))
        if calls or thought:
            self._texts[answer] = action.text
        if calls:
            self._calling[answer.call_ids] = answer
        finish_reason = "tool_calls" if calls else "length" if action.is_cut else "stop"
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

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
        said, tools = self._read(body)
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
        for waiting in [*([] if self._asked is None else [self._asked]), *self._waiting]:
            # A client that gave up waiting asks again: that is not a further turn.
            is_same = (waiting.said, waiting.tools, waiting.num_tries) == (said, tools, num_tries)
            if is_same and await waiting.is_gone():
                waiting.answer.cancel()
                waiting.answer, waiting.is_gone = answer, is_gone
                return await answer
        model = str(body.get("model", "policy"))
        limit, may_call = min(limits, default=None), bool(tools) and body.get("tool_choice") != "none"
        self._waiting.append(
            _Request(
                said=said,
                tools=tools,
                may_call=may_call,
                max_tokens=limit,
                num_tries=num_tries,
                model=model,
                answer=answer,
                is_gone=is_gone,
                id_prefix=id_prefix,
                has_thoughts=has_thoughts,
            )
        )
        self._arrived.set()
        return await answer

    def num_tokens(self, body: Mapping[str, Any]) -> int:
        """Count the tokens of a request's messages and tools. Raises RequestError as `ask` does."""
        said, tools = self._read(body)
        assert self.count_tokens is not None, "a worker has the conversation"
        return self.count_tokens(self._messages(said), tools)

    def _read(self, body: Mapping[str, Any]) -> tuple[list[Said], Sequence[Mapping[str, object]]]:
        """Return the messages and tools of a request. Raises RequestError for what cannot be honoured."""
        if self._is_closed:
            raise RequestError("the conversation has ended")
        refuse_fields(body)
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages is missing or empty, expected the whole conversation so far")
        messages = in_order_of_calls(messages)
        said = [self._known(read_message(message, f"messages[{i}]")) for i, message in enumerate(messages)]
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError(f"tools is {str(tools)[:80]}, expected a list of objects")
        return said, tools

    def _known(self, said: Said) -> Said:
        """Return a message, or the answer that it is by the ids of its calls: clients may change arguments."""
        known = self._calling.get(said.call_ids, said)
        if known != said:
            self.changed.add(said.call_ids)
        return known

    def close(self) -> None:
        """End all chats: who still waits for an answer gets none."""
        self._is_closed = True
        for waiting in [*([] if self._asked is None else [self._asked]), *self._waiting]:
            if not waiting.answer.done():
                waiting.answer.set_exception(RequestError("the conversation has ended"))
