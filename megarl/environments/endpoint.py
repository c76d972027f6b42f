"""Serve chats over HTTP in the forms of `dialects`: an agent asks for the next turn of its chat, the policy answers.

Each sample has a URL of its own that nobody else can guess; `megarl.environments.chat` says what a request means.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megarl.environments.chat import Chat
from megarl.environments.chat_requests import RequestError
from megarl.environments.dialects import DIALECTS, Dialect
from megarl.host.http_server import BoundedServer, JsonReader, RequestRefusedError
from megarl.host.listeners import LOOPBACK, hold_port

# A conversation of some millions of tokens.
MAX_REQUEST_BYTES = 64 << 20
# An agent may take long between two requests, and a connection that is closed meanwhile would cost it the second one.
KEEP_ALIVE_S = 24 * 3600
# The only model of the list, with the fields of OpenAI and of Anthropic.
_MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "megarl", "type": "model"}
_MODEL |= {"display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}
# By route, its dialect, and whether it counts tokens. Clients are given a base URL with or without /v1, and some add
# one.
_ROUTES = {
    f"{base}{path}": (dialect, path == dialect.count_path)
    for base in ("", "v1/", "v1/v1/")
    for dialect in DIALECTS
    for path in (dialect.path, dialect.count_path)
    if path
}
# The routes to which clients send what they record of themselves.
_TELEMETRY = ("api/event_logging", "v1/traces", "v1/metrics", "v1/logs")


class ChatServer(BoundedServer):
    """An HTTP server in the running event loop, on a port of this host alone; it lives as long as the loop."""

    def __init__(self) -> None:
        self._chats: dict[str, Chat] = {}
        self._bodies = JsonReader(MAX_REQUEST_BYTES)
        super().__init__(
            self._serve_request,
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

    async def serve_sent(self, way: socket.socket) -> None:
        """Serve at a socket that a program without this host's network opens, and sends over `way`."""
        with way:
            _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, way, 1, 1)
        if descriptors:
            kind: Any = self.config.http_protocol_class
            protocol = functools.partial(kind, config=self.config, server_state=self.server_state, app_state={})
            loop, listener = asyncio.get_running_loop(), socket.socket(fileno=descriptors[0])
            async with await loop.create_server(protocol, sock=listener) as server:
                await server.serve_forever()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application does."""
        request = Request(scope, receive, send)
        _, base, key, path = (*scope["path"].split("/", 3), "", "", "")[:4]
        chat = self._chats.get(key) if base == "s" else None
        dialect, is_count = _ROUTES.get(path, (None, False)) if scope["method"] == "POST" else (None, False)
        if chat is None:
            said = _dialect_in(path).error(404, "there is no such conversation, or it has ended")
            response: Response = JSONResponse(said, status_code=404)
        else:
            scope["state"]["connection"].trust()
            if dialect is None:
                response = _rest(chat, scope["method"], path.strip("/"))
            else:
                response = await self._complete(chat, dialect, request, is_count=is_count)
        await response(scope, receive, send)

    async def _complete(self, chat: Chat, dialect: Dialect, request: Request, *, is_count: bool) -> Response:
        """Answer a request for a turn, or count its tokens."""
        try:
            body = await self._bodies.read(request)
            if not isinstance(body, Mapping):
                raise RequestError(f"the body is {type(body).__name__}, expected an object")
            asked = dialect.read(body, chat)
            if is_count:
                return JSONResponse(dialect.count(chat.num_tokens(asked)))
            completion = await chat.ask(
                asked, request.is_disconnected, id_prefix=dialect.id_prefix, has_thoughts=dialect.has_thoughts
            )
            written = dialect.write(completion, body, chat)
        except RequestError as error:
            return _refusal(chat, dialect, 400, str(error))
        except RequestRefusedError as error:
            return _refusal(chat, dialect, error.status, str(error))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            said = f"the body is not what this API takes: {type(error).__name__}: {error}"
            return _refusal(chat, dialect, 400, said)
        if not body.get("stream"):
            return JSONResponse(written)
        return StreamingResponse(dialect.events(written, body), media_type="text/event-stream")


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, ChatServer] = WeakKeyDictionary()


def chat_server() -> ChatServer:
    """Return the server of the running event loop, which starts with its first use."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        _SERVERS[loop] = ChatServer()
    return _SERVERS[loop]


def _dialect_in(path: str) -> Dialect:
    return next((each for each in DIALECTS if each.path in path), DIALECTS[0])


def _rest(chat: Chat, method: str, path: str) -> Response:
    """Answer a request that is not for a turn: lists of models, telemetry, and what this server does not have."""
    if method in ("GET", "HEAD") and (not path or "models" in path.split("/")):
        name = path.rpartition("models")[2].strip("/")
        return JSONResponse(_MODEL | {"id": name} if name else {"object": "list", "data": [_MODEL], "has_more": False})
    if method == "POST" and path.startswith(_TELEMETRY):
        return Response(status_code=204)
    known = ", ".join(f"POST /v1/{each.path}" for each in DIALECTS)
    said = f"there is no {method} /{path} here; there are {known} and GET /v1/models"
    return _refusal(chat, _dialect_in(path), 404, said)


def _refusal(chat: Chat, dialect: Dialect, status: int, message: str) -> Response:
    """Return an error, with a status after which clients do not retry. Agents may ignore it, so it is counted."""
    chat.num_refused += 1
    return JSONResponse(dialect.error(status, message), status_code=status)
