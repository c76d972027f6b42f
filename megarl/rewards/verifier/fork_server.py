"""Run the fork server: a small process that has imported what scorers need, and forks workers on request.

A forked worker starts in milliseconds and shares the memory of imported code. The process that owns the pool must not
fork, because it has threads and perhaps a CUDA context. The fork server is a new process with a single thread, and
never executes a job itself, so that no job can change the state that workers start from.
"""

import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from megarl.rewards.verifier.types import VerifierOptions, read_message
from megarl.rewards.verifier.worker import adopt_orphans, die_with_parent, resolve, work

_WORKER_FD = 3


class ForkServer:
    """A process that forks a worker for every connection, until the pool's end of the control socket closes."""

    def __init__(self, control: socket.socket, options: VerifierOptions) -> None:
        self._control, self._options = control, options
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._workers: dict[int, int] = {}

    def serve(self) -> None:
        """Fork and reap workers until the pool closes its control socket, then end all workers."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._end(key.fd)
                    continue
                message, files, _, _ = socket.recv_fds(self._control, 1, 1)
                for fd in files:
                    self._fork(fd)
                    os.close(fd)
                if not message:
                    for pidfd in list(self._workers):
                        self._end(pidfd)
                    return

    def _fork(self, fd: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            # The worker must never return into the server's stack.
            try:
                # A worker closes all of the server's file descriptors except its connection.
                os.dup2(fd, _WORKER_FD, inheritable=False)
                os.closerange(_WORKER_FD + 1, os.sysconf("SC_OPEN_MAX"))
                work(socket.socket(fileno=_WORKER_FD), self._options, parent)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _end(self, pidfd: int) -> None:
        """Kill a worker and all processes that it has started, and reap them."""
        pid = self._workers.pop(pidfd)
        self._selector.unregister(pidfd)
        for kill in (os.kill, os.killpg):
            # The worker may not lead a process group yet, or the group may be empty.
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)
        # Those that have left its group are now children of this process.
        workers = set(self._workers.values())
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while orphans := set(map(int, children.read_text(encoding="utf-8").split())) - workers:
            for pid in orphans:
                # Its own children take its place here.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def main(argv: list[str]) -> None:
    """Run `python -m megarl.rewards.verifier.fork_server CONTROL_FD PARENT_PID`; the pool sends its options first."""
    control, parent = socket.socket(fileno=int(argv[0])), int(argv[1])
    die_with_parent(parent)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message = read_message(control)
    if message is None:
        return
    options: VerifierOptions = pickle.loads(message)
    for name in options.preload:
        if ":" in name:
            resolve(name)()
        else:
            importlib.import_module(name)
        if len(os.listdir("/proc/self/task")) > 1:
            raise SystemExit(f"verifier preload: {name!r} started threads, which do not survive a fork; leave it out")
    gc.collect()
    # The garbage collector would write to memory that workers share, and so copy it.
    gc.freeze()
    ForkServer(control, options).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
