"""Each HTTP listener of a run goes on, and counts, while strangers of all kinds hold all connections that they get."""

import asyncio
import contextlib
import random
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

from megarl.cluster.judge_key import KEY_VARIABLE, RequireKey
from megarl.config.rewards import RewardsConfig
from megarl.environments.chat import Chat
from megarl.environments.endpoint import chat_server
from megarl.host import http_server
from megarl.host.http_server import BoundedServer, bound
from megarl.host.stage import make_process_files, read_foreign
from megarl.rewards.rule import RuleJudge
from megarl.rewards.serve import PATH, RewardService, ServeOptions
from tests.helpers.waiting import wait_until

KEY, WAIT_S = "k" * 16, 60.0
DESCRIPTORS, NUM_OF_A_KIND = 400, 150
# What a stranger sends: noise, a part of a request, and a byte; "flood" leaves as soon as it has come.
KINDS = {
    "junk": random.Random(0).randbytes(4096),
    "half-open": b"POST /v1/chat/completions HTTP/1.1\r\ncontent-le",
    "slow": b"P",
    "flood": b"",
}
# Starts a listener, and returns its server and the URL at which those who know the key get an answer: this status.
Listen = Callable[[], Awaitable[tuple[uvicorn.Server, str, int]]]


async def agents_endpoint() -> tuple[uvicorn.Server, str, int]:
    server = chat_server()
    return server, f"{server.open(Chat(None))}/chat/completions", 400


async def judge_server() -> tuple[uvicorn.Server, str, int]:
    """As vLLM makes it, with the settings of its own that `judge_process` changes."""
    app = RequireKey(Starlette(routes=[Mount("/", PlainTextResponse("well"))]))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    return server, await served(bound(server, "judge_server")), 200


async def reward_service() -> tuple[uvicorn.Server, str, int]:
    service = RewardService(RuleJudge(RewardsConfig()), ServeOptions(), key=KEY)
    server = BoundedServer(service.app(), "reward_service", log_config=None)
    return server, f"{await served(server)}{PATH}", 400


async def served(server: uvicorn.Server) -> str:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server.capture_signals = contextlib.nullcontext
    serving.append(asyncio.get_running_loop().create_task(server.serve([listener])))
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


serving = list[object]()


@pytest.mark.parametrize("listen", [agents_endpoint, judge_server, reward_service], ids=lambda listen: listen.__name__)
def test_a_listener_goes_on_among_strangers_and_counts_them(
    listen: Listen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_process_files()
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)
    monkeypatch.setattr(http_server, "BODY_S", 0.2)
    monkeypatch.setattr(http_server, "descriptor_limit", lambda: DESCRIPTORS)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server, url, expected = asyncio.run_coroutine_threadsafe(listen(), loop).result(WAIT_S)
    address, most = (httpx.URL(url).host, httpx.URL(url).port), 0

    def ask() -> None:
        nonlocal most
        most = max(most, len(server.server_state.connections))
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.post(url, content=b"{", headers=headers, timeout=WAIT_S, trust_env=False).status_code == expected

    try:
        wait_until(lambda: server.started, "the server", timeout_s=WAIT_S)
        with contextlib.ExitStack() as held:
            for kind, said in KINDS.items():
                for _ in range(NUM_OF_A_KIND):
                    stranger = held.enter_context(socket.create_connection(address, timeout=WAIT_S))
                    stranger.sendall(said)
                    if kind == "flood":
                        stranger.close()
                ask()
            # All of them are closed, though none of them leaves.
            wait_until(lambda: not server.server_state.connections, "the end of the last", timeout_s=WAIT_S)
            ask()
        wait_until(lambda: sum(read_foreign().values()) >= 2 * NUM_OF_A_KIND, "the count", timeout_s=WAIT_S)
        assert read_foreign().keys() == {listen.__name__}
        assert most <= DESCRIPTORS * 3 // 4
    finally:
        server.should_exit = True
        wait_until(lambda: not asyncio.all_tasks(loop), "its end", timeout_s=WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
