"""Serve the models of `rewards.judge_servers` with vLLM on devices of their own, for the judges of a run."""

import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import psutil
import ray

from megarl.cluster.actors import RunActor
from megarl.cluster.ending import END_TIMEOUT_S, end_run_processes
from megarl.config.judges import JudgeServerConfig
from megarl.device.platform import platform
from megarl.errors import WorkerError

_POLL_S = 0.5
# Flags by device, for settings that the configuration leaves open; those of the rollout engines, for the same reasons.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"kv-cache-memory-bytes": 64 << 20, "block-size": 32, "enforce-eager": True},
    "cuda": {},
}


class JudgeServerActor(RunActor):
    """A Ray actor that keeps one `vllm serve` process on its devices; the run ends if that process dies."""

    def __init__(self) -> None:
        super().__init__()
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, cfg: JudgeServerConfig, *, timeout_s: float) -> str:
        """Start the server, wait until it answers, and return the base URL of its endpoint.

        Raises WorkerError if it ends, or does not answer in time.
        """
        address = ray.util.get_node_ip_address()
        with socket.socket() as held:
            held.bind((address, 0))
            port = held.getsockname()[1]
        # It writes to this actor's log.
        self._server = subprocess.Popen(server_command(cfg, address, port), start_new_session=True)
        url, deadline = f"http://{address}:{port}", time.monotonic() + timeout_s
        while not _is_healthy(url):
            if self._server.poll() is not None or time.monotonic() > deadline:
                ended = "does not answer" if self._server.poll() is None else f"ended with {self._server.returncode}"
                self.call("close")
                raise WorkerError(f"rewards.judge_servers: the server of {cfg.model} {ended}; see RUN/logs for why")
            time.sleep(_POLL_S)
        return f"{url}/v1"

    def lost_workers(self) -> list[int]:
        return [0] if self._server is not None and self._server.poll() is not None else []

    def call(self, method: str) -> None:
        """End the server with its workers; `close` is the only method."""
        assert method == "close", method
        if self._server is None:
            return
        workers = [child.pid for child in psutil.Process(self._server.pid).children(recursive=True)]
        self._server.terminate()
        try:
            self._server.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
        end_run_processes(workers)


def server_command(cfg: JudgeServerConfig, address: str, port: int) -> Sequence[str]:
    """Return the command that serves a model; later flags override earlier ones, so `args` come last."""
    flags: dict[str, Any] = {
        "model": cfg.model,
        "host": address,
        "port": port,
        "tensor-parallel-size": cfg.tp,
        **_DEFAULTS[platform().name],
        **cfg.args,
    }
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words += [f"--{name}", str(value)]
    return words


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
