"""Serve the models of `rewards.judge_servers` with vLLM on devices of their own, for the judges of a run."""

import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

import httpx
import psutil
import ray

from megarl.cluster.actors import RunActor
from megarl.cluster.judge_key import KEY_VARIABLE, RequireKey
from megarl.cluster.ray_session import END_TIMEOUT_S, end_run_processes
from megarl.config.judges import JudgeServerConfig
from megarl.errors import WorkerError
from megarl.host.child_environment import SAFE_PATH, child_environment, python_module
from megarl.host.clock import awake_s
from megarl.host.device.platform import platform
from megarl.host.listeners import LOOPBACK, hold_port
from megarl.host.streams import print_lines

_POLL_S = 0.5
# How often a server that died is started again in a run, since one that keeps dying judges nothing.
MAX_RESTARTS = 3
# Flags by device, for settings that the configuration leaves open; those of the rollout engines, for the same reasons.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "cpu": {"kv-cache-memory-bytes": 64 << 20, "block-size": 32, "enforce-eager": True},
    "cuda": {},
}


class JudgeServerActor(RunActor):
    """A Ray actor that keeps one `vllm serve` process on its devices, and starts it again if it dies."""

    def __init__(self) -> None:
        super().__init__()
        self._server: subprocess.Popen[bytes] | None = None
        self._command: Sequence[str] = ()
        self._environment: Mapping[str, str] = {}
        self._workers: Sequence[int] = ()
        self._num_restarts = 0
        # Bound to the server's port as long as this actor lives.
        self._held: socket.socket | None = None

    def start(self, cfg: JudgeServerConfig, *, api_key: str, timeout_s: float, several_hosts: bool = False) -> str:
        """Start the server, wait until it answers, and return the base URL of its endpoint.

        api_key: required in every request. several_hosts: whether the server listens at the node's address instead of
        only on loopback.

        Raises:
            ConfigError: a variable of `pass_env` is not set.
            WorkerError: the server ends, or does not answer in time.
        """
        address = ray.util.get_node_ip_address() if several_hosts else LOOPBACK
        self._held = hold_port(address)
        port = self._held.getsockname()[1]
        # The key is not on the command line, which every user of the host can read.
        passed = child_environment(cfg.pass_env, key="rewards.judge_servers.NAME.pass_env")
        self._command = server_command(cfg, address, port)
        self._environment = {**passed, **SAFE_PATH, KEY_VARIABLE: api_key}
        self._serve()
        assert self._server is not None
        url, deadline = f"http://{address}:{port}", awake_s() + timeout_s
        while not _is_healthy(url, api_key):
            if self._server.poll() is not None or awake_s() > deadline:
                ended = "does not answer" if self._server.poll() is None else f"ended with {self._server.returncode}"
                self.close()
                raise WorkerError(f"rewards.judge_servers: the server of {cfg.model} {ended}; see RUN/logs for why")
            time.sleep(_POLL_S)
        self._workers = self._list_workers()
        return f"{url}/v1"

    def lost_workers(self) -> list[int]:
        """Start the server again, at the same address, if it has died; report it as lost if it has died too often.

        Until it answers, requests to it fail, and the judge turns to its other replicas.
        """
        if self._server is None:
            return []
        if (code := self._server.poll()) is None:
            self._workers = self._list_workers() or self._workers
            return []
        if self._num_restarts == MAX_RESTARTS:
            return [0]
        self._num_restarts += 1
        # Its workers may live on, and hold the devices' memory.
        end_run_processes(self._workers)
        print_lines(f"a judge's server ended with {code}; restart {self._num_restarts} of {MAX_RESTARTS}")
        self._serve()
        return []

    def _serve(self) -> None:
        """Start the server's process, which writes to this actor's log."""
        self._server = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        self._workers = ()

    def _list_workers(self) -> Sequence[int]:
        """List the processes that the server has started; none if it has just died."""
        assert self._server is not None
        try:
            return [child.pid for child in psutil.Process(self._server.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """End the server with its workers."""
        if self._held is not None:
            self._held.close()
        if self._server is None:
            return
        workers = self._list_workers() or self._workers
        self._server.terminate()
        try:
            self._server.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
        end_run_processes(workers)


def server_command(cfg: JudgeServerConfig, address: str, port: int) -> Sequence[str]:
    """Return the command that serves a model; later flags override earlier ones, so `args` come last."""
    flags: dict[str, object] = {
        "model": cfg.model,
        "host": address,
        "port": port,
        "tensor-parallel-size": cfg.tp,
        "worker-extension-cls": "megarl.rollout.judge_process.JudgeWorker",
        # A line for each request would let strangers fill the disk.
        "uvicorn-log-level": "error",
        "disable-uvicorn-access-log": True,
        **_DEFAULTS[platform().name],
        **cfg.args,
    }
    words = [
        *python_module("megarl.rollout.judge_process"),
        "--middleware",
        f"{RequireKey.__module__}.{RequireKey.__qualname__}",
    ]
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words += [f"--{name}", str(value)]
    return words


def _is_healthy(url: str, api_key: str) -> bool:
    headers = {"authorization": f"Bearer {api_key}"}
    try:
        with httpx.stream("GET", f"{url}/health", headers=headers, timeout=5.0, trust_env=False) as reply:
            return reply.is_success
    except httpx.HTTPError:
        return False
