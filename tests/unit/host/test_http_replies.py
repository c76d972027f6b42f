"""No reply over HTTP may fill this host's memory, whoever sends it."""

import ast
import asyncio
import gzip
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import httpx2
import openai
import pytest

from megarl.errors import LargeReplyError
from megarl.host import http_replies
from megarl.host.http_replies import BOUNDED
from tests.unit.test_import_rules import called_name, read_sources

MOST = 1000
# In JSON, as a chat's completion may hold it.
BODIES = {"fits": MOST, "exceeds": MOST + 1, "unpacked": MOST + 1, "moved": MOST + 1}


class Server(BaseHTTPRequestHandler):
    """Answers with as many bytes as the path says, packed or with another address."""

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        body = json.dumps("x" * (BODIES[name] - 2)).encode()
        if name == "unpacked":
            body = gzip.compress(body)
        self.send_response(307 if name == "moved" else 200)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers |= {"content-encoding": "gzip"} if name == "unpacked" else {}
        headers |= {"location": "/fits"} if name == "moved" else {}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(http_replies, "MOST_BYTES", MOST)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def by_httpx(url: str) -> int:
    async with httpx.AsyncClient(event_hooks=BOUNDED, follow_redirects=True) as client:
        return len((await client.get(url)).content)


async def by_stream(url: str) -> int:
    async with httpx.AsyncClient(event_hooks=BOUNDED, follow_redirects=True) as client, client.stream("GET", url) as it:
        return sum([len(part) async for part in it.aiter_text()])


async def by_httpx2(url: str) -> int:
    async with httpx2.AsyncClient(event_hooks=BOUNDED, follow_redirects=True) as client:
        return len(await (await client.get(url)).aread())


async def by_openai(url: str) -> int:
    base, _, path = url.rpartition("/")
    async with openai.DefaultAsyncHttpxClient(event_hooks=BOUNDED) as http:
        client = openai.AsyncOpenAI(base_url=base, api_key="k", http_client=http, max_retries=0)
        try:
            return len((await client.get(f"/{path}", cast_to=httpx.Response)).content)
        except openai.APIConnectionError as error:
            raise error.__cause__ or error from None


@pytest.mark.parametrize("get", [by_httpx, by_stream, by_httpx2, by_openai])
def test_a_reply_is_read_up_to_the_limit(url: str, get: Callable[[str], Awaitable[int]]) -> None:
    """Bytes count as they are unpacked, and those of redirects, too."""
    for name, size in BODIES.items():
        if size <= MOST:
            assert asyncio.run(get(f"{url}/{name}")) == size
        else:
            with pytest.raises(LargeReplyError, match=r"^got more than 1000 bytes$"):
                asyncio.run(get(f"{url}/{name}"))


def test_every_client_has_the_limit() -> None:
    calls = [
        node
        for source in read_sources()
        for node in source.nodes
        if isinstance(node, ast.Call) and called_name(node).endswith(("AsyncClient", "HttpxClient"))
    ]
    assert len(calls) == 6
    assert all("event_hooks=BOUNDED" in ast.unparse(call) for call in calls)
    whole = ("httpx.get", "httpx.post", "httpx.request", "httpx.Client", "urllib.request.urlopen")
    last = {name.rpartition(".")[2] for name in whole}
    used = {
        ast.unparse(node)
        for source in read_sources()
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in last
    }
    assert used.isdisjoint(whole)
