"""A server with clients that send too much, too slowly, too deep or nothing, on real sockets."""

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from megarl.host import http_server
from megarl.host.clock import awake_s
from megarl.host.http_server import BoundedServer, JsonReader, RequestRefusedError, trust
from tests.helpers.waiting import wait_until

MAX_BYTES, MAX_STRANGERS = 300_000, 5
WAIT_S = 60.0


class Client(socket.socket):
    """A connection that sends bytes as they are."""

    def post(self, body: bytes, *headers: str, length: int | None = None) -> tuple[int, bytes]:
        """Send a request, of which `length` bytes are announced, and return the status and body of the answer."""
        self.sendall(head(*headers, length=len(body) if length is None else length) + body)
        return self.answer()

    def answer(self) -> tuple[int, bytes]:
        with self.makefile("rb") as lines:
            status = int(lines.readline().split()[1])
            length = 0
            while line := lines.readline().strip():
                name, _, value = line.lower().partition(b":")
                length = int(value) if name == b"content-length" else length
            return status, lines.read(length)

    def rest(self) -> bytes:
        """Return what comes until the server closes the connection."""
        content = b""
        try:
            while part := self.recv(1 << 16):
                content += part
        except ConnectionResetError:
            pass
        return content


def head(*headers: str, length: int) -> bytes:
    lines = ["POST / HTTP/1.1", "host: a", f"content-length: {length}", *headers, "", ""]
    return "\r\n".join(lines).encode()


@pytest.fixture
def connect() -> Iterator[Callable[[], Client]]:
    """A function that connects to a server, which returns the length of a body's JSON and trusts whoever has a key."""
    bodies, clients = JsonReader(MAX_BYTES), list[Client]()

    async def answer(request: Request) -> Response:
        if "key" in request.headers:
            trust(request)
        try:
            return JSONResponse(len(await bodies.read(request)))
        except RequestRefusedError as error:
            return JSONResponse(str(error), status_code=error.status)

    listener = socket.create_server(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/", answer, methods=["POST"])])
    server = BoundedServer(app, "test", max_strangers=MAX_STRANGERS, timeout_keep_alive=3600, log_config=None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()

    def new() -> Client:
        client = Client(socket.AF_INET, socket.SOCK_STREAM)
        client.settimeout(WAIT_S)
        client.connect(listener.getsockname())
        clients.append(client)
        return client

    try:
        yield new
    finally:
        for client in clients:
            client.close()
        server.should_exit = True
        thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.5)
    monkeypatch.setattr(http_server, "BODY_S", 1.0)


def trickle(client: Client, byte: bytes) -> bytes:
    """Send a byte again and again until the server closes the connection, and return what it said."""
    client.settimeout(0.1)
    said, until = b"", time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            client.sendall(byte)
            if not (part := client.recv(1 << 16)):
                return said
            said += part
        except TimeoutError:
            continue
        except OSError:
            return said
    raise AssertionError("the server waits for ever")


def test_a_client_may_be_late_with_its_first_byte(
    connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that shares an overloaded machine: it connects, and sends nothing for longer than a head may take."""
    later_s, asked = 0.0, list[float]()

    def now() -> float:
        asked.append(later_s)
        return awake_s() + later_s

    monkeypatch.setattr(http_server, "awake_s", now)
    client = connect()
    wait_until(lambda: bool(asked), "the connection", timeout_s=WAIT_S)
    later_s = 1.5 * http_server.HEAD_S
    # The server looks once a second which connections are late.
    wait_until(lambda: asked.count(later_s) >= 2, "a look at the connections", timeout_s=WAIT_S)
    client.sendall(head(length=2) + b"[]")
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("begun", "byte", "said"),
    [
        (b"", b"", b""),
        (b"", b"\r\n", b""),
        (b"POST / HTTP/1.1\r\nx: ", b"a", b"HTTP/1.1 400"),
        (head(length=100), b" ", b"HTTP/1.1 400"),
        (
            head("transfer-encoding: chunked", length=0).replace(b"content-length: 0\r\n", b""),
            b"1\r\na\r\n",
            b"HTTP/1.1 400",
        ),
        # Refused at once, so that the rest is of no use.
        (head(length=MAX_BYTES + 1), b" ", b"HTTP/1.1 413"),
        # Answered, and no other request follows.
        (head(length=2) + b"[]", b"\r\n", b"HTTP/1.1 200"),
    ],
    ids=["nothing", "empty lines", "head", "body", "chunks", "refused body", "next request"],
)
def test_whoever_is_slow_is_left(connect: Callable[[], Client], begun: bytes, byte: bytes, said: bytes) -> None:
    client = connect()
    client.sendall(begun)
    answer = trickle(client, byte)
    assert (answer[: len(said)], answer.count(b"HTTP/1.1 ")) == (said, 1 if said else 0)
    assert connect().post(b"[1]") == (200, b"1")


@pytest.mark.usefixtures("impatient")
def test_a_trusted_connection_may_be_idle(connect: Callable[[], Client]) -> None:
    mine = connect()
    assert mine.post(b"[1]", "key: 1") == (200, b"1")
    stranger = connect()
    assert stranger.post(b"[1]") == (200, b"1")
    assert stranger.rest() == b""
    assert mine.post(b"[1, 2]") == (200, b"2")


def test_the_oldest_stranger_gives_way_and_no_other(connect: Callable[[], Client]) -> None:
    mine = connect()
    assert mine.post(b"[1]", "key: 1") == (200, b"1")
    strangers = [connect() for _ in range(MAX_STRANGERS + 2)]
    for client in strangers[:2]:
        assert client.rest() == b""
    for client in (mine, *strangers[2:]):
        assert client.post(b"[1]") == (200, b"1")


def test_connections_that_showed_no_key_are_counted(
    connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least half of their number is told: that which is new, when the number has doubled."""
    told = list[int]()
    monkeypatch.setattr(http_server, "note_foreign", lambda _, number: told.append(number))
    mine = connect()
    assert mine.post(b"[1]", "key: 1") == (200, b"1")
    for said in (b"", bytes(100), b"POST / HTTP/1.1\r\nx: ", head(length=2) + b"[1]"):
        stranger = connect()
        stranger.sendall(said)
        stranger.close()
    mine.close()
    wait_until(lambda: sum(told) > 0, "the first number", timeout_s=WAIT_S)
    for _ in range(9):
        connect().close()
    wait_until(lambda: sum(told) >= 7, "the next", timeout_s=WAIT_S)
    assert sum(told) <= 13


def test_a_size_is_refused_before_it_is_sent_and_while_it_is(connect: Callable[[], Client]) -> None:
    status, message = connect().post(b"", length=MAX_BYTES + 1)
    assert (status, b"more than 300000 bytes" in message) == (413, True)
    chunked = connect()
    chunked.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(4):
        chunked.sendall(b"186a0\r\n" + b" " * 100_000 + b"\r\n")
    assert chunked.answer()[0] == 413
    assert connect().post(b"[" + b" " * (MAX_BYTES - 2) + b"]") == (200, b"0")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 30_000,
        b"[" + b"1" * 5000 + b"]",
        b"[NaN]",
        b"[-Infinity]",
        b'["\xff"]',
        b'["\xed\xa0\xbd"]',
        '["a"]'.encode("utf-16"),
        b'["\\ud83d"]',
        b'["\\UD83D"]',
        b"",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_no_json_in_utf_8(connect: Callable[[], Client], body: bytes) -> None:
    client = connect()
    status, message = client.post(body)
    assert (status, len(json.loads(message)) < 250) == (400, True)
    assert client.post(b"[1]") == (200, b"1")


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nx: " + b"a" * 40_000,
        b"POST /" + b"a" * 40_000,
        b"POST / HTTP/1.1\r\n" + b"a:\r\n" * 1000,
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\nx: " + b"a" * 40_000,
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2;x=" + b"a" * 40_000,
        b"POST / HTTP/1.1\r\ncontent-length: " + b"0" * 5000 + b"2\r\n\r\n[]",
        b"POST / HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        b"a\r\n\r\n",
    ],
    ids=["header", "path", "headers", "trailer", "extension", "length", "two lengths", "no http"],
)
def test_what_is_no_request_of_a_usual_size(connect: Callable[[], Client], request_: bytes) -> None:
    client = connect()
    client.sendall(request_)
    assert client.answer()[0] == 400
    assert connect().post(b"[1]") == (200, b"1")


def test_many_requests_at_once_are_none(connect: Callable[[], Client]) -> None:
    client = connect()
    client.sendall((head(length=2) + b"[]") * 5000)
    assert client.rest().count(b"HTTP/1.1 200") <= 1
    assert connect().post(b"[1]") == (200, b"1")


def test_the_largest_unfinished_body_gives_way(connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "DISK_BYTES", 150_000)
    large, small = connect(), connect()
    large.sendall(head(length=120_001) + b"[" + b" " * 100_000)
    small.sendall(head(length=60_002) + b"[" + b" " * 60_000)

    def gave_way() -> bool:
        """Whether it has an answer to its next byte, although not all have come."""
        large.sendall(b" ")
        return bool(select.select([large], [], [], 0)[0])

    wait_until(gave_way, "the answer to the larger body")
    assert large.answer()[0] == 503
    small.sendall(b"]")
    assert small.answer() == (200, b"0")


def test_a_body_gives_way_after_its_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client's part comes between the last part of a body and the end of its request."""
    monkeypatch.setattr(http_server, "DISK_BYTES", 8)
    reader = JsonReader(MAX_BYTES)

    def request(*parts: bytes, before_end: asyncio.Event) -> Request:
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

        async def receive() -> Message:
            if messages:
                return messages.pop(0)
            await before_end.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        return Request({"type": "http", "headers": []}, receive)

    async def both() -> list[object]:
        come = asyncio.Event()
        first = asyncio.create_task(reader.read(request(b"[1,", b"2]  ", before_end=come)))
        await asyncio.sleep(0)
        second = asyncio.create_task(reader.read(request(b"[", b"3]", before_end=come)))
        await asyncio.sleep(0)
        come.set()
        return await asyncio.gather(first, second, return_exceptions=True)

    refused, read = asyncio.run(both())
    assert isinstance(refused, RequestRefusedError)
    assert refused.status == 503
    assert read == [3]
