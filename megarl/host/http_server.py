"""Serve HTTP to untrusted clients: whatever one does or fails to do, the others are served.

uvicorn alone waits forever for the rest of a request, and keeps as many connections as come. Here a client has a time
limit for each thing that it has to do, what is held for it is bounded, and beyond a number of connections the oldest
gives way.
"""

import asyncio
import json
import math
import resource
from tempfile import SpooledTemporaryFile
from typing import Any, NoReturn

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from megarl.host.clock import awake_s
from megarl.host.stage import note_foreign

# Time for a request's head once it has begun, for its body, and between the requests of a client that has shown no key.
HEAD_S, BODY_S = 10.0, 60.0
# Bounds of a request's head, and of what comes between the parts of its body.
HEAD_BYTES, MAX_HEADERS = 16 << 10, 100
# An unfinished body lies in memory up to this size, then on disk, and all of them together up to the second one.
MEMORY_BYTES, DISK_BYTES = 16 << 10, 1 << 30
# All agents of a batch may connect at the same time.
MAX_STRANGERS = 4096


class RequestRefusedError(Exception):
    """A request that is answered with `status` and one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def descriptor_limit() -> int:
    """Return how many files and connections this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def bound(server: uvicorn.Server, listener: str, *, max_strangers: int = MAX_STRANGERS) -> uvicorn.Server:
    """Let no client fill or block a server that has not started yet, and return it.

    A connection is a stranger's until `trust` is called for one of its requests, and while it waits for its client. At
    most `max_strangers` of those are open: for one more, the oldest is closed. Connections that were trusted, or wait
    for an answer, stay. listener: its name where strangers are counted.
    """
    if not server.config.loaded:
        server.config.load()
    server.config.http_protocol_class, server.config.ws_protocol_class = _Connection, None
    # So many are accepted in one turn of the loop, before any gives way.
    server.config.backlog = min(server.config.backlog, descriptor_limit() // 4)
    shared = server.server_state = _Connections(max_strangers)
    num_told = 0

    async def close_overdue() -> None:
        nonlocal num_told
        now = awake_s()
        for connection in list(server.server_state.connections):
            assert isinstance(connection, _Connection), "the server was configured so"
            if connection.deadline < now:
                connection.give_up()
        # A line for each would let clients fill the log.
        if (count := shared.num_foreign) > 2 * num_told:
            note_foreign(listener, count - num_told)
            num_told = count

    server.config.callback_notify, server.config.timeout_notify = close_overdue, 1
    return server


class BoundedServer(uvicorn.Server):
    """A uvicorn server with the bounds of `bound`; settings: further ones of uvicorn."""

    def __init__(self, app: ASGIApp, listener: str, *, max_strangers: int = MAX_STRANGERS, **settings: Any) -> None:
        # A line for each malformed request would let clients fill the log.
        config = uvicorn.Config(
            app,
            interface="asgi3",
            lifespan="off",
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            **settings,
        )
        super().__init__(config)
        bound(self, listener, max_strangers=max_strangers)


def trust(request: Request) -> None:
    """Keep the connection of a client that has shown a key."""
    request.state.connection.trust()


class JsonReader:
    """Reads the bodies of requests; those that are not complete yet hold little memory, and a bounded share of disk."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unfinished: set[SpooledTemporaryFile[bytes]] = set()

    async def read(self, request: Request) -> object:
        """Return the JSON of a request. Raises RequestRefusedError for what is too large, or is not JSON in UTF-8."""
        too_large = RequestRefusedError(413, f"got more than {self._max_bytes} bytes; send less at a time")
        no_room = RequestRefusedError(503, "the service has no room for the body; try again")
        content = b""
        with SpooledTemporaryFile(MEMORY_BYTES) as body:
            self._unfinished.add(body)
            try:
                # Python refuses numbers of thousands of digits.
                if (num_bytes := int(request.headers.get("content-length", "0"))) > self._max_bytes:
                    raise too_large
                async for part in request.stream():
                    if content or len(part) == num_bytes:
                        content = content or part  # All of it has come at once, and is in memory.
                        continue
                    if body.closed:
                        raise no_room
                    body.write(part)
                    if body.tell() > self._max_bytes:
                        raise too_large
                    while sum(body.tell() for body in self._unfinished) > DISK_BYTES:
                        # Since connections are limited, a client that sends no more than others is never dropped.
                        largest = max(self._unfinished, key=lambda body: body.tell())
                        self._unfinished.remove(largest)
                        largest.close()
                if not content:
                    # Another body can take its place also after its last part.
                    if body.closed:
                        raise no_room
                    body.seek(0)
                    content = body.read()
            except ClientDisconnect:
                raise RequestRefusedError(400, "the connection ended within the body") from None
            except ValueError as error:
                raise RequestRefusedError(400, f"content-length: {error}") from error
            except OSError as error:
                raise RequestRefusedError(503, f"the service cannot store the body: {error.strerror}") from error
            finally:
                self._unfinished.discard(body)
        try:
            parsed = _DECODER.decode(content.decode())
            if b"\\ud" in content or b"\\uD" in content:
                # JSON can spell half a character, which no tokenizer and no answer takes.
                json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.start + 1]
            message = f"the body has half of a character, {half!r}, expected whole ones; replace it"
            raise RequestRefusedError(400, message) from error
        except (ValueError, RecursionError) as error:
            raise RequestRefusedError(400, f"got no JSON: {type(error).__name__}: {error}") from error
        return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class _Connections(ServerState):
    """State that the connections of a server share: their bounds, and those of strangers, the oldest first."""

    def __init__(self, max_strangers: int) -> None:
        super().__init__()
        self.max_strangers, self.max_connections = max_strangers, descriptor_limit() // 2
        self.strangers: dict[_Connection, None] = {}
        self.num_foreign = 0  # They have ended, and were never trusted.


class _Connection(HttpToolsProtocol):
    """A connection that ends at its deadline, the time by which its client must have gone on."""

    server_state: _Connections

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.deadline = math.inf
        self._is_trusted = False
        # Whether a request has begun, and not yet arrived; and the bytes since its last part, which the parser holds.
        self._is_reading, self._num_held = False, 0

    def trust(self) -> None:
        self._is_trusted = True
        self.server_state.strangers.pop(self, None)

    def give_up(self) -> None:
        """Close the connection; tell a client whose request is late."""
        if self._is_reading and not self.transport.is_closing():
            self._refuse(f"It did not arrive within {HEAD_S:.0f} s for its head and {BODY_S:.0f} s for its body.")
        else:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A client that shares a busy machine may take long to send anything; for others that come, it gives way.
        self._wait(BODY_S)
        shared = self.server_state
        shared.strangers[self] = None
        if len(shared.strangers) > shared.max_strangers or len(shared.connections) > shared.max_connections:
            oldest = next(iter(shared.strangers))
            del shared.strangers[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.strangers.pop(self, None)
        self.server_state.num_foreign += not self._is_trusted
        super().connection_lost(exc)
        # Its scope refers to the connection, which would else wait for the garbage collector.
        self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), HEAD_BYTES):
            part = data[start : start + HEAD_BYTES]
            self._num_held += len(part)
            super().data_received(part)
            if self._num_held > HEAD_BYTES:
                self._refuse(f"The request's head has more than {HEAD_BYTES} bytes.")
            if self.transport.is_closing():
                return

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            raise ValueError("requests come one after the other")
        super().on_message_begin()
        self.cycle, self._is_reading = None, True  # type: ignore[assignment]
        self._wait(HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) == MAX_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_held = 0
        self._wait(BODY_S)
        self.scope["state"]["connection"] = self
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_reading = False
        if self.cycle.response_complete:
            self._wait_for_next()
        else:
            self.deadline = math.inf
            self.server_state.strangers.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_reading:
            # The rest of a body that nobody reads is waited for, lest the client miss its answer.
            self._wait(HEAD_S)
        else:
            self._wait_for_next()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait(BODY_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._is_reading and self.cycle is not None and not self.cycle.response_complete:
            self.deadline = math.inf

    def _wait(self, seconds: float) -> None:
        self.deadline = awake_s() + seconds

    def _wait_for_next(self) -> None:
        """Wait for the next request, and before it until the client has taken its answer."""
        self._wait(self.timeout_keep_alive if self._is_trusted else BODY_S if self.flow.write_paused else HEAD_S)
        if not self._is_trusted:
            self.server_state.strangers[self] = None

    def _refuse(self, message: str) -> None:
        """Answer a request that has not arrived, if it has no answer, and close the connection."""
        if self.cycle is None or not self.cycle.response_started:
            self.send_400_response(message)
        else:
            self.transport.abort()
