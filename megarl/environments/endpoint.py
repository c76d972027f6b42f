"""Serve chats over HTTP in OpenAI's form: an agent asks for the next turn of its chat, and the policy answers.

Each sample has a chat of its own, under a URL that nobody else can guess. The policy's tokens never pass here, only
their text: what an agent sends back of earlier turns is compared with them, and not tokenised again.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megarl.environments.base import Action
from megarl.environments.parsers import Parser
from megarl.host.http_server import BoundedServer, JsonReader, RequestRefusedError, descriptor_limit, trust
from megarl.host.listeners import LOOPBACK
from megarl.host.ports import hold_port
from megarl.texts.unicode import readable
from megarl.types import Message

# Fields of a request that ask for what one chat of a policy in training cannot have, with the values that do not.
# Every other field that is not read, such as temperature, is ignored: the run's settings decide how turns are sampled.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "logit_bias": ({},),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
# A conversation of some millions of tokens.
MAX_REQUEST_BYTES = 64 << 20
# All agents of a batch may connect at the same time.
MAX_STRANGERS = 4096
# An agent may take long between two requests, and a connection that is closed meanwhile would cost it the second one.
KEEP_ALIVE_S = 24 * 3600


class RequestError(ValueError):
    """A request that is not answered; the agent is told why."""


class ChatBrokenError(RequestError):
    """A request that goes on with another chat than that of the sample, which cannot be trained any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAsked:
    """A request for the policy's next turn. messages: what follows the last turn; for the first, the whole prompt.

    max_tokens: the limit of the turn, if the request has one.
    """

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """The parts of a message that are compared: who said it, the text, and each call's name and arguments."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class _Unanswered:
    """A request that waits for the policy, with the whole chat that it sent."""

    said: list[_Said]
    model: str
    answer: asyncio.Future[dict[str, Any]]


class Chat:
    """The chat of one sample, between the HTTP requests of its agent and the environment that has the policy's turns.

    It only grows: each request has all messages so far, as they were sent and answered, and then new ones.
    """

    def __init__(self, parse: Parser | None) -> None:
        """Begin a chat; `parse` finds the policy's calls of tools, if any are looked for."""
        self.key = secrets.token_urlsafe(16)
        self._parse = parse
        self._said: list[_Said] = []
        self._tools: list[Mapping[str, Any]] = []
        self._unanswered: _Unanswered | None = None
        self._broken: ChatBrokenError | None = None
        self._arrived: asyncio.Queue[TurnAsked | ChatBrokenError] = asyncio.Queue()

    async def next_request(self) -> TurnAsked:
        """Wait for the agent to ask for a turn. Raises ChatBrokenError if it asked for what cannot be trained."""
        arrived = await self._arrived.get()
        if isinstance(arrived, ChatBrokenError):
            raise arrived
        return arrived

    def answer(self, action: Action) -> int:
        """Answer the agent's request with the policy's turn; return the number of tools that it calls."""
        assert self._unanswered is not None, "the policy speaks when it is asked"
        asked, self._unanswered = self._unanswered, None
        calls = list(self._parse(action.text)) if self._parse and self._tools and not action.is_cut else []
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
        message: dict[str, Any] = {"role": "assistant", "content": content.strip() or None if calls else content}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{action.turn}_{i}", "type": "function", "function": function}
                for i, function in enumerate(functions)
            ]
        self._said = [*asked.said, _read_message(message, "the answer")]
        choice = {"index": 0, "message": message, "logprobs": None}
        choice["finish_reason"] = "tool_calls" if calls else "length" if action.is_cut else "stop"
        usage = {"prompt_tokens": action.num_before, "completion_tokens": action.num_tokens}
        completion = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": readable(asked.model),
            "choices": [choice],
            "usage": usage | {"total_tokens": action.num_before + action.num_tokens},
        }
        # The client may have gone.
        if not asked.answer.done():
            asked.answer.set_result(completion)
        return len(calls)

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the completion of a request. Raises RequestError, also when the chat ends before it is answered."""
        if self._broken is not None:
            raise self._broken
        _refuse_fields(body)
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages is missing or empty, expected the whole conversation so far")
        said = [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError(f"tools is {str(tools)[:80]}, expected a list of objects")
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if (waiting := self._unanswered) is not None:
            if said != waiting.said:
                raise self._break("a request came before the last one was answered; ask for one turn after the other")
            # A client that gave up waiting asks again. Should the first still be there, it must not count twice.
            if not waiting.answer.done():
                waiting.answer.set_exception(RequestError("the same request came again; that one is answered"))
            waiting.answer = answer
            return await answer
        new = self._new_messages(said)
        if self._said and tools != self._tools:
            raise self._break("the tools differ from those of the first request, which are in the prompt")
        limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
        self._tools = tools
        self._unanswered = _Unanswered(said=said, model=str(body.get("model", "policy")), answer=answer)
        self._arrived.put_nowait(TurnAsked(messages=new, tools=tools, max_tokens=min(limits, default=None)))
        return await answer

    def close(self) -> None:
        """End the chat: who still waits for an answer gets none."""
        self._broken = self._broken or ChatBrokenError("the conversation has ended")
        if self._unanswered is not None and not self._unanswered.answer.done():
            self._unanswered.answer.set_exception(self._broken)

    def _new_messages(self, said: Sequence[_Said]) -> tuple[Message, ...]:
        """Return the messages after the last turn. Raises RequestError if the request does not go on with the chat."""
        known = self._said
        if said[-1].role == "assistant":
            raise RequestError("the last message is the assistant's, expected one that the policy answers")
        if not known:
            for i, each in enumerate(said):
                if each.calls:
                    raise RequestError(
                        f"messages[{i}] of the first request has tool_calls, expected text; write it out"
                    )
        for i, (was, now) in enumerate(zip(known, said, strict=False)):
            if was != now:
                raise self._break(f"messages[{i}] was {was.role} {was.text[:60]!r} and is {now.role} {now.text[:60]!r}")
        if len(said) <= len(known):
            raise self._break(f"{len(said)} messages are not more than the {len(known)} so far")
        new = said[len(known) :]
        if known and any(each.role == "assistant" for each in new):
            raise self._break("a new message is the assistant's, expected the policy's turns alone")
        roles = {"developer": "system"}
        return tuple(Message(role=roles.get(each.role, each.role), content=each.text) for each in new)

    def _break(self, reason: str) -> ChatBrokenError:
        """Return the error that spoils the sample, for the request and for whoever waits for the next one."""
        self._broken = ChatBrokenError(
            f"the request does not go on with the conversation: {reason}; a sample is one conversation that only grows"
        )
        self._arrived.put_nowait(self._broken)
        return self._broken


class ChatServer(BoundedServer):
    """An HTTP server in the running event loop, on a port of this host alone; it lives as long as the loop."""

    def __init__(self) -> None:
        self._chats: dict[str, Chat] = {}
        self._bodies = JsonReader(MAX_REQUEST_BYTES)
        route = Route("/s/{key}/v1/chat/completions", self._complete, methods=["POST"])
        super().__init__(
            Starlette(routes=[route]),
            max_strangers=min(MAX_STRANGERS, descriptor_limit() // 2),
            keep_alive_s=KEEP_ALIVE_S,
            # Else uvicorn would change the logging of the whole process.
            log_config=None,
        )
        # Agents that run as programs have it open, too: if this process dies, nobody else can answer them.
        self.held = hold_port(LOOPBACK)
        # Connections wait here until the server runs.
        listener = socket.create_server(self.held.getsockname(), backlog=4096, reuse_port=True)
        self._address = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        self._serving = asyncio.get_running_loop().create_task(self.serve(sockets=[listener]))

    def open(self, chat: Chat) -> str:
        """Return the base URL of a new chat."""
        self._chats[chat.key] = chat
        return f"{self._address}/s/{chat.key}/v1"

    def close(self, chat: Chat) -> None:
        """End a chat."""
        chat.close()
        self._chats.pop(chat.key, None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def _complete(self, request: Request) -> Response:
        """Answer a request for a turn."""
        chat = self._chats.get(request.path_params["key"])
        if chat is None:
            return _error(404, "there is no such conversation, or it has ended")
        trust(request)
        try:
            body = await self._bodies.read(request)
            if not isinstance(body, Mapping):
                raise RequestError(f"the body is {type(body).__name__}, expected an object")
            completion = await chat.ask(body)
        except RequestError as error:
            return _error(400, str(error))
        except RequestRefusedError as error:
            return _error(error.status, str(error))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            return _error(400, f"the body is not what OpenAI's API takes: {type(error).__name__}: {error}")
        if not body.get("stream"):
            return JSONResponse(completion)
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(_events(completion, with_usage=with_usage), media_type="text/event-stream")


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, ChatServer] = WeakKeyDictionary()


def chat_server() -> ChatServer:
    """Return the server of the running event loop, which starts with its first use."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        _SERVERS[loop] = ChatServer()
    return _SERVERS[loop]


def _error(status: int, message: str) -> Response:
    """Return an error in OpenAI's form, with a status that clients do not try again after."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


def _events(completion: Mapping[str, Any], *, with_usage: bool) -> Iterator[str]:
    """Yield a completion as the events of a stream: the turn, its end, and what it used if that is asked for."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        parts.append({"choices": [], "usage": completion["usage"]})
    for part in parts:
        yield f"data: {json.dumps(head | part)}\n\n"
    yield "data: [DONE]\n\n"


def _refuse_fields(body: Mapping[str, Any]) -> None:
    """Raise RequestError for fields that cannot be honoured, and must not be ignored."""
    for name, harmless in REFUSED.items():
        if body.get(name) is not None and body[name] not in harmless:
            remedy = "; set rollout.stop" if name == "stop" else ""
            raise RequestError(f"{name} is {body[name]!r}, expected it to be left out{remedy}")
    for name in ("max_tokens", "max_completion_tokens"):
        if (limit := body.get(name)) is not None and (not isinstance(limit, int) or limit < 1):
            raise RequestError(f"{name} is {limit!r}, expected a whole number of at least 1")


def _read_message(message: Any, place: str) -> _Said:
    """Read what counts of a message. Raises RequestError for one that is not text."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise RequestError(f"{place} is {str(message)[:80]}, expected an object with a role among {', '.join(ROLES)}")
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        raise RequestError(f"{place}.content has a part that is no text, expected text alone")
    text = "".join(str(part.get("text", "")) for part in parts)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments", "")
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            # Clients may write the same arguments in another way.
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        calls.append((str(function.get("name")), str(arguments)))
    # Clients may also strip the answers that they repeat.
    return _Said(
        role=message["role"], text=text.strip() if message["role"] == "assistant" else text, calls=tuple(calls)
    )
