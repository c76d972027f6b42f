"""A small process that has imported what scorers need and forks workers on request.

A worker costs milliseconds and shares the imported code's memory with the others. The process that owns the pool has
threads, perhaps a CUDA context, and cannot fork; this one is started afresh, has one thread, and stays clean because
it never executes a job.
"""

import gc
import os
import pickle
import selectors
import signal
import socket
import traceback
from contextlib import suppress

from megarl.rewards.verifier import worker
from megarl.rewards.verifier.channel import read_message
from megarl.rewards.verifier.containment import die_with_parent, num_threads
from megarl.rewards.verifier.references import load_module, resolve
from megarl.rewards.verifier.types import VerifierOptions

_WORKER_FD = 3


def preload(names: tuple[str, ...]) -> None:
    """Imports modules and calls functions, and makes sure that forking is still safe."""
    for name in names:
        if ":" in name:
            resolve(name)()
        else:
            load_module(name)
        if num_threads() > 1:
            raise SystemExit(f"verifier preload: {name!r} started threads, which do not survive a fork; leave it out")
    gc.collect()
    # The collector would write to, and so copy, memory that workers share.
    gc.freeze()


class ForkServer:
    """Forks a worker for every connection that arrives, until the pool's end of the control socket closes."""

    def __init__(self, control: socket.socket, options: VerifierOptions) -> None:
        self._control, self._options = control, options
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._workers: dict[int, int] = {}

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._end(key.fd)
                elif not self._accept():
                    for pidfd in list(self._workers):
                        self._end(pidfd)
                    return

    def _accept(self) -> bool:
        message, files, _, _ = socket.recv_fds(self._control, 1, 1)
        for fd in files:
            self._fork(fd)
            os.close(fd)
        return bool(message)

    def _fork(self, fd: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            # Never back into the server's stack, whatever happens.
            try:
                _become_worker(fd, self._options, parent)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _end(self, pidfd: int) -> None:
        """Kills a worker and what it has started, and reaps it."""
        pid = self._workers.pop(pidfd)
        self._selector.unregister(pidfd)
        for kill in (os.kill, os.killpg):
            # Not yet a group of its own, or the group is empty.
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


def _become_worker(fd: int, options: VerifierOptions, parent: int) -> None:
    """Keeps nothing of the server's but the connection."""
    os.dup2(fd, _WORKER_FD, inheritable=False)
    os.closerange(_WORKER_FD + 1, os.sysconf("SC_OPEN_MAX"))
    worker.work(socket.socket(fileno=_WORKER_FD), options, parent)


def main(argv: list[str]) -> None:
    """`python -m megarl.rewards.verifier CONTROL_FD PARENT_PID`, started by a pool, which sends its options first."""
    control, parent = socket.socket(fileno=int(argv[0])), int(argv[1])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message = read_message(control)
    if message is None:
        return
    options = pickle.loads(message)
    preload(options.preload)
    ForkServer(control, options).serve()
