"""Start, watch and end the worker processes of a verifier pool, and the fork server that forks them."""

import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from megarl.errors import WorkerError
from megarl.host.child_environment import child_environment, python_module
from megarl.host.clock import awake_s
from megarl.rewards.verifier.types import JobResult, VerifierOptions, WorkerChannel, write_message

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_EXIT_S = 5.0
# Number of consecutive workers that may fail to become ready, per worker of the pool.
_MAX_FAILED_STARTS = 3
_SERVER = "megarl.rewards.verifier.fork_server"


@dataclass(slots=True, kw_only=True)
class PendingJob:
    """A job that has no result yet.

    message: the job as a worker receives it.
    shortened: the worker sees only the end of the response.
    deadline_s: the time after which the worker is killed.
    """

    message: bytes
    function: str
    shortened: bool
    deadline_s: float
    future: Future[JobResult]


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """A worker process: `pidfd` is set once it is ready, `job` while it executes one."""

    channel: WorkerChannel
    pidfd: int | None = None
    job: PendingJob | None = None
    # Times on the monotonic clock: the beginning of the job's execution, and the deadline of the job or of the start.
    since: float = 0.0
    expires: float = 0.0
    # Scorers that the worker has imported.
    functions: set[str] = field(default_factory=set)


class Fleet:
    """The workers of a pool, `num_workers + num_spares` of which are kept alive; only the thread that made it may use
    it.

    `on_event` is called with a worker that has sent something or has ended.
    """

    def __init__(
        self, options: VerifierOptions, selector: selectors.BaseSelector, on_event: Callable[[Worker], None]
    ) -> None:
        self._options, self._selector, self._on_event = options, selector, on_event
        self._size = options.num_workers + options.num_spares
        self.workers: list[Worker] = []
        self._failed_starts = 0
        self._server: subprocess.Popen[bytes] | None = None

    def start_server(self, _: int = 0) -> None:
        """Start the fork server (the process that forks workers), replacing an earlier one.

        The server is a new process, not a fork, and dies with this thread. It sends nothing, so its connection becomes
        readable only when the server has ended, and its workers with it.
        """
        self._stop_server()
        ours, theirs = socket.socketpair()
        command = [*python_module(_SERVER), str(theirs.fileno()), str(os.getpid())]
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {
            **child_environment(self._options.pass_env, key="rewards.custom.pass_env"),
            **single,
            "CUDA_VISIBLE_DEVICES": "",
            # Sets then have the same order in every process, and with it the results of computer algebra.
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }
        self._server = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._control = ours
        write_message(ours, pickle.dumps(self._options))
        self._selector.register(ours, _READ, self.start_server)

    def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        self._selector.unregister(self._control)
        self._control.close()
        try:
            server.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def replenish(self) -> None:
        """Request as many workers from the fork server as are missing."""
        for _ in range(self._size - len(self.workers)):
            ours, theirs = socket.socketpair()
            with theirs, suppress(ConnectionError):
                # The end of a server is noticed when its connection is read.
                socket.send_fds(self._control, [b"F"], [theirs.fileno()])
            expires = awake_s() + self._options.start_limit_s
            worker = Worker(channel=WorkerChannel(ours), expires=expires)
            self.workers.append(worker)
            self._selector.register(ours, _READ, lambda events, worker=worker: self._handle(worker, events))

    def _handle(self, worker: Worker, events: int) -> None:
        if events & _WRITE:
            self.flush(worker)
        if not events & _READ:
            return
        if worker.pidfd is not None:
            self._on_event(worker)
            return
        try:
            # There is no file descriptor at the end of the stream.
            files = socket.recv_fds(worker.channel.connection, 1, 1)[1]
        except ConnectionError:
            files = []
        if files:
            worker.pidfd, self._failed_starts = files[0], 0
        else:
            self.give_up(worker)

    def give_up(self, worker: Worker) -> None:
        """Discard a worker that did not become ready; raise WorkerError if too many in a row have failed to start."""
        self.discard(worker)
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS * self._size:
            raise WorkerError(
                f"{self._failed_starts} verifier workers in a row ended, or took {self._options.start_limit_s} s, "
                "before they were ready; why is in this process's standard error; check that the names in verifier "
                "preload can be imported"
            )

    def flush(self, worker: Worker) -> None:
        """Send as much of a worker's queued messages as its socket accepts now, and the rest when it accepts more.

        An error is ignored here: reading the connection shows that the worker has ended.
        """
        with suppress(ConnectionError):
            worker.channel.flush()
        connection = worker.channel.connection
        events = _READ | (_WRITE if worker.channel.unsent else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, self._selector.get_key(connection).data)

    def discard(self, worker: Worker) -> None:
        """Kill a worker; the fork server reaps it and kills the processes that it has started."""
        self.workers.remove(worker)
        self._selector.unregister(worker.channel.connection)
        if worker.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            os.close(worker.pidfd)
        worker.channel.connection.close()

    def close(self) -> None:
        """End the workers and the fork server."""
        for worker in list(self.workers):
            self.discard(worker)
        self._stop_server()
