"""Serve chats over HTTP in OpenAI's form: an agent asks for the next turn of its chat, and the policy answers.

Each sample has a URL of its own that nobody else can guess; `megarl.environments.chat` says what a request means.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megarl.environments.chat import Chat, RequestError
from megarl.host.http_server import BoundedServer, JsonReader, RequestRefusedError, trust
from megarl.host.listeners import LOOPBACK, hold_port

# A conversation of some millions of tokens.
MAX_REQUEST_BYTES = 64 << 20
# An agent may take long between two requests, and a connection that is closed meanwhile would cost it the second one.
KEEP_ALIVE_S = 24 * 3600


class ChatServer(BoundedServer):
    """An HTTP server in the running event loop, on a port of this host alone; it lives as long as the loop."""

    def __init__(self) -> None:
        self._chats: dict[str, Chat] = {}
        self._bodies = JsonReader(MAX_REQUEST_BYTES)
        route = Route("/s/{key}/v1/chat/completions", self._complete, methods=["POST"])
        super().__init__(
            Starlette(routes=[route]),
            "agents_endpoint",
            timeout_keep_alive=KEEP_ALIVE_S,
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
            completion = await chat.ask(body, request.is_disconnected)
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
    """Yield a completion as the events of a stream: each turn and its end, and what it used if that is asked for."""
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    parts: list[dict[str, object]] = []
    for choice in completion["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        index = choice["index"]
        parts.append({"choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        parts.append({"choices": [{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if with_usage:
        parts.append({"choices": [], "usage": completion["usage"]})
    for part in parts:
        yield f"data: {json.dumps(head | part)}\n\n"
    yield "data: [DONE]\n\n"
