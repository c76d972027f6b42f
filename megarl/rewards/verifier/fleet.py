"""The fork server and the workers of a pool, as seen by the pool's own thread."""

import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from megarl.errors import WorkerError
from megarl.rewards.verifier.channel import Channel, write_message
from megarl.rewards.verifier.types import Verdict, VerifierOptions

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_EXIT_S = 5.0
# As often all workers may, one after the other, fail to become ready.
_MAX_FAILED_STARTS = 3
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(slots=True, kw_only=True)
class Task:
    """A job on its way: `message` is what a worker reads."""

    message: bytes
    function: str
    shortened: bool
    future: Future[Verdict]


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """A worker process; `pidfd` is known once it is ready, `task` while it executes one."""

    channel: Channel
    pidfd: int | None = None
    task: Task | None = None
    # On the monotonic clock: when the task's execution began, and when that, or the start, will have taken too long.
    since: float = 0.0
    expires: float = 0.0
    # Scorers that it has imported.
    functions: set[str] = field(default_factory=set)


class Fleet:
    """Keeps `num_workers + num_spares` workers alive. Only one thread may use it, the one that made it.

    `on_event` is called with a worker that has something to read, or that has ended.
    """

    def __init__(
        self, options: VerifierOptions, selector: selectors.BaseSelector, on_event: Callable[[Worker], None]
    ) -> None:
        self._options, self._selector, self._on_event = options, selector, on_event
        self._size = options.num_workers + options.num_spares
        self.workers: list[Worker] = []
        self._failed_starts = 0
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._start_server()
        self.replenish()

    def _start_server(self) -> None:
        """A process of its own, not a fork; its parent is this thread, with which it dies."""
        self._server = None
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", _PACKAGE, str(theirs.fileno()), str(os.getpid())]
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {
            **os.environ,
            **single,
            "CUDA_VISIBLE_DEVICES": "",
            # The order of sets, and with it what algebra does, is the same in every process.
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }
        self._server = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._control = ours
        write_message(ours, pickle.dumps(self._options))
        self._selector.register(ours, _READ, self._read_server)

    def _read_server(self, _: int) -> None:
        """The server has ended, for it says nothing; its workers have too. Another one is started."""
        self._stop_server()
        self._start_server()

    def _stop_server(self) -> None:
        assert self._server is not None
        self._selector.unregister(self._control)
        self._control.close()
        try:
            self._server.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def replenish(self) -> None:
        """Asks for the workers that are missing."""
        for _ in range(self._size - len(self.workers)):
            ours, theirs = socket.socketpair()
            with theirs, suppress(ConnectionError):
                # A server that has ended is noticed where it is read from.
                socket.send_fds(self._control, [b"F"], [theirs.fileno()])
            expires = time.monotonic() + self._options.start_limit_s
            worker = Worker(channel=Channel(ours), expires=expires)
            self.workers.append(worker)
            self._selector.register(ours, _READ, lambda events, worker=worker: self._handle(worker, events))

    def _handle(self, worker: Worker, events: int) -> None:
        if events & _WRITE:
            self._flush(worker)
        if not events & _READ:
            return
        if worker.pidfd is not None:
            self._on_event(worker)
            return
        if files := worker.channel.read_files():
            worker.pidfd, self._failed_starts = files[0], 0
        else:
            self.give_up(worker)

    def give_up(self, worker: Worker) -> None:
        """Discards a worker that has not become ready; WorkerError if that is all they do."""
        self.discard(worker)
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS * self._size:
            raise WorkerError(
                f"{self._failed_starts} verifier workers in a row ended, or took {self._options.start_limit_s} s, "
                "before they were ready; why is in this process's standard error; check that the names in verifier "
                "preload can be imported"
            )

    def send(self, worker: Worker, message: bytes) -> None:
        """Never waits; a worker that has ended is noticed where it is read from."""
        with suppress(ConnectionError):
            worker.channel.send(message)
        self._watch(worker)

    def _flush(self, worker: Worker) -> None:
        with suppress(ConnectionError):
            worker.channel.flush()
        self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        events = _READ | (_WRITE if worker.channel.has_unsent else 0)
        if self._selector.get_key(worker.channel).events != events:
            self._selector.modify(worker.channel, events, self._selector.get_key(worker.channel).data)

    def discard(self, worker: Worker) -> None:
        """Kills a worker. The server kills what it has started, and reaps it."""
        self.workers.remove(worker)
        self._selector.unregister(worker.channel)
        if worker.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            os.close(worker.pidfd)
        worker.channel.close()

    def close(self) -> None:
        for worker in list(self.workers):
            self.discard(worker)
        if self._server is not None:
            self._stop_server()
