"""The command that serves a judge's model, and what becomes of a server that dies."""

import socket
import sys
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from megarl.cluster import judge_servers
from megarl.cluster.judge_key import RequireKey
from megarl.cluster.judge_servers import JudgeServerActor, server_command
from megarl.config.judges import JudgeServerConfig
from tests.helpers.second_user import needs_second_user
from tests.helpers.strangers import ways_to_take
from tests.helpers.waiting import wait_until

# Says that it is well to those who know the key, and has a worker that ends only if it is made to.
SERVER = """
import http.server, os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("authorization") == "Bearer " + os.environ["VLLM_API_KEY"]
        self.send_response(200 if known and "HF_TOKEN" not in os.environ else 401)
        self.end_headers()
http.server.HTTPServer.allow_reuse_port = True
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_flags_of_a_server() -> None:
    """The user's flags replace those of the device; null and false leave a flag out."""
    args = {"max-model-len": 512, "block-size": 16, "enforce-eager": False, "trust-remote-code": True, "seed": None}
    command = server_command(JudgeServerConfig(model="m", tp=2, args=args), "10.0.0.1", 81)
    assert command == [
        *(sys.executable, "-P", "-m", "megarl.rollout.judge_process"),
        *("--middleware", "megarl.cluster.judge_key.RequireKey"),
        *("--model", "m", "--host", "10.0.0.1", "--port", "81", "--tensor-parallel-size", "2"),
        *("--worker-extension-cls", "megarl.rollout.judge_process.JudgeWorker"),
        *("--uvicorn-log-level", "error", "--disable-uvicorn-access-log"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--block-size", "16", "--max-model-len", "512"),
        "--trust-remote-code",
    ]


def kill(actor: JudgeServerActor) -> None:
    assert actor._server is not None
    actor._server.kill()
    actor._server.wait()


def test_a_server_that_dies_is_started_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_RUN_ID", "judge-servers-test")
    monkeypatch.setenv("HF_TOKEN", "the user's")
    monkeypatch.setattr(judge_servers, "_POLL_S", 0.05)
    monkeypatch.setattr(judge_servers, "MAX_RESTARTS", 1)
    monkeypatch.setattr(judge_servers, "server_command", lambda _, __, port: [sys.executable, "-c", SERVER, str(port)])
    actor = JudgeServerActor()
    try:
        url = actor.start(JudgeServerConfig(model="m"), api_key="k", timeout_s=120).removesuffix("/v1")
        assert url.startswith("http://127.0.0.1:")
        assert not judge_servers._is_healthy(url, "another")
        assert actor.lost_workers() == []
        (worker,) = (psutil.Process(pid) for pid in actor._workers)
        kill(actor)
        assert worker.is_running()
        assert actor.lost_workers() == []
        assert psutil.wait_procs([worker], timeout=10)[1] == []
        wait_until(lambda: judge_servers._is_healthy(url, "k"), "a restarted server", timeout_s=120)
        assert actor.lost_workers() == []
        kill(actor)
        assert actor.lost_workers() == [0]
    finally:
        actor.close()


@needs_second_user
def test_nobody_else_gets_the_port_before_a_server_listens_nor_after_it_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has it reads what the policy writes, and says how good that is."""
    before: list[list[str]] = []

    def command(_: JudgeServerConfig, __: str, port: int) -> list[str]:
        before.append(ways_to_take(port))
        return [sys.executable, "-c", SERVER, str(port)]

    monkeypatch.setenv("MEGARL_RUN_ID", "judge-servers-test")
    monkeypatch.setattr(judge_servers, "_POLL_S", 0.05)
    monkeypatch.setattr(judge_servers, "server_command", command)
    actor = JudgeServerActor()
    try:
        port = urlsplit(actor.start(JudgeServerConfig(model="m"), api_key="k", timeout_s=120)).port or 0
        kill(actor)
        assert (before, ways_to_take(port)) == ([[]], [])
        # Clients learn at once that nobody is there, and turn to other replicas.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    finally:
        actor.close()
    assert "127.0.0.1 SO_REUSEADDR" in ways_to_take(port)


@pytest.mark.parametrize("path", ["/v1/models", "/invocations", "/metrics", "/health", "/pause"])
def test_every_path_asks_for_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of those who know it are trusted."""
    monkeypatch.setenv("VLLM_API_KEY", "k")
    client, trusted = TestClient(RequireKey(PlainTextResponse("served"))), list[str]()
    client.app_state["connection"] = SimpleNamespace(trust=lambda: trusted.append(path))
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "k"}):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, answer.text) == (401, '{"error":"the run\'s key is missing"}')
    assert trusted == []
    assert client.get(path, headers={"authorization": "Bearer k"}).text == "served"
    assert trusted == [path]
