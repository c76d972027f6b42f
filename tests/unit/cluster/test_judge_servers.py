"""The command that serves a judge's model, and what becomes of a server that dies."""

import sys
import time

import psutil
import pytest

from megarl.cluster import judge_servers
from megarl.cluster.judge_servers import JudgeServerActor, server_command
from megarl.config.judges import JudgeServerConfig

# Says that it is well, and has a worker that ends only if it is made to.
SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_flags_of_a_server() -> None:
    """The user's flags replace those of the device; null and false leave a flag out."""
    args = {"max-model-len": 512, "block-size": 16, "enforce-eager": False, "trust-remote-code": True, "seed": None}
    command = server_command(JudgeServerConfig(model="m", tp=2, args=args), "10.0.0.1", 81)
    assert command == [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "m", "--host", "10.0.0.1", "--port", "81", "--tensor-parallel-size", "2"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--block-size", "16", "--max-model-len", "512"),
        "--trust-remote-code",
    ]


def kill(actor: JudgeServerActor) -> None:
    assert actor._server is not None
    actor._server.kill()
    actor._server.wait()


def test_a_server_that_dies_is_started_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_RUN_ID", "judge-servers-test")
    monkeypatch.setattr(judge_servers.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(judge_servers, "_POLL_S", 0.05)
    monkeypatch.setattr(judge_servers, "MAX_RESTARTS", 1)
    monkeypatch.setattr(judge_servers, "server_command", lambda _, __, port: [sys.executable, "-c", SERVER, str(port)])
    actor = JudgeServerActor()
    try:
        url = actor.start(JudgeServerConfig(model="m"), timeout_s=30).removesuffix("/v1")
        assert actor.lost_workers() == []
        (worker,) = (psutil.Process(pid) for pid in actor._workers)
        kill(actor)
        assert worker.is_running()
        assert actor.lost_workers() == []
        assert psutil.wait_procs([worker], timeout=10)[1] == []
        deadline = time.monotonic() + 30
        while not judge_servers._is_healthy(url):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert actor.lost_workers() == []
        kill(actor)
        assert actor.lost_workers() == [0]
    finally:
        actor.call("close")
