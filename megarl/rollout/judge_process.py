"""Start vLLM's server of a judge: `python -m megarl.rollout.judge_process`, with the arguments of `vllm serve`.

A `JudgeServerActor` holds the server's port for this user. Linux lets the server listen there if it shares the port,
which vLLM asks for only where it starts several servers. vLLM's workers import this module too.
"""

from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.launchers.api_server import entry

from megarl.host.device.gloo import close_gloo
from megarl.host.http_server import bound

close_gloo()


class JudgeWorker:
    """A mixin of vLLM's worker class, which only makes workers import this module."""


if __name__ == "__main__":
    create, serve = launcher.create_server_socket, launcher.NoSignalServer
    launcher.create_server_socket = lambda address, *, reuse_port: create(address, reuse_port=True)
    launcher.NoSignalServer = lambda *given, **options: bound(serve(*given, **options), "judge_server")
    entry.main()
