"""Start vLLM's server of a judge: `python -m megarl.rollout.judge_process`, with the arguments of `vllm serve`.

A `JudgeServerActor` holds the server's port for this user. Linux lets the server listen there if it shares the port,
which vLLM asks for only where it starts several servers. vLLM's workers import this module too.
"""

import socket

from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.launchers.api_server import entry

from megarl.host.device.gloo import close_gloo

close_gloo()
_create = launcher.create_server_socket


def _create_shared(address: tuple[str, int], *, reuse_port: bool) -> socket.socket:
    shared: socket.socket = _create(address, reuse_port=True)
    return shared


class JudgeWorker:
    """A mixin of vLLM's worker class, which only makes workers import this module."""


if __name__ == "__main__":
    launcher.create_server_socket = _create_shared
    entry.main()
