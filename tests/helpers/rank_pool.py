"""Ordinary processes, one per rank, that run a function on all ranks at once.

A rank's imports take seconds. So a session shares its pools, and on CPU their ranks are forks of one server that has
done the imports (`rank_imports.py`). Nothing heavy is imported here: the environment is set before torch is imported.
"""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from megarl.host.device.platform import apply_environment, platform

# What the other ranks get to finish once one has failed: usually they wait for it in a collective.
GRACE_S = 1.0
# What the first call may take longer: imports, on a machine that does other things too.
START_S = 90.0
# A rank that computed for this share of its time does not hang, but waits for other work: it gets its time again.
COMPUTES, MAX_TIMES = 0.02, 3


# What the server of the forks imports.
PRELOAD = ["tests.helpers.rank_imports"]


class RankError(Exception):
    """A function failed, hung or ended its process on some rank; the message has each rank's traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a function is told of the process it runs in, as its first argument."""

    rank: int
    world_size: int
    # Shared by the ranks, and gone with them.
    directory: str
    device: str
    # The environment variables of the pool's process when the rank was started.
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    value: Any = None
    error: str | None = None


class RankPool:
    """`world_size` processes on a platform, on CUDA a device each. They start with the first call, and again after a
    failure. preloaded: whether they have imported Megatron by then; on CUDA they have not.
    """

    def __init__(
        self, world_size: int, *, timeout_s: float = 60.0, device: str = "cpu", preloaded: bool = True
    ) -> None:
        self.world_size, self.timeout_s, self.device, self.preloaded = world_size, timeout_s, device, preloaded
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """`function(context, *args, **kwargs)` on every rank; results by rank. A failure ends the processes.

        The function must be importable by name, and arguments and results picklable. Ranks that still compute when
        their time is over get it again, at most twice.
        """
        payload = pickle.dumps((function, args, kwargs))
        timeout_s = timeout_s or self.timeout_s
        try:
            if not self._processes:
                self._start()
                timeout_s += START_S
            for connection in self._connections:
                connection.send_bytes(payload)
            replies = self._collect(timeout_s)
        except BaseException:
            self.kill()
            raise
        errors = [f"rank {rank}: {reply.error}" for rank, reply in sorted(replies.items()) if reply.error]
        if errors:
            self.kill()
            raise RankError("\n".join(errors))
        return [replies[rank].value for rank in range(self.world_size)]

    def kill(self) -> None:
        """End the processes; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="megarl-ranks-")
        # CUDA must not be touched before a fork, and some imports look for devices.
        how = multiprocessing.get_context("forkserver" if self.preloaded and self.device == "cpu" else "spawn")
        how.set_forkserver_preload(PRELOAD)
        for rank in range(self.world_size):
            context = RankContext(
                rank=rank,
                world_size=self.world_size,
                directory=self._directory.name,
                device=self.device,
                environment=dict(os.environ),
            )
            ours, theirs = how.Pipe()
            process = how.Process(target=_serve, args=(theirs, context), daemon=True)
            self._connections.append(ours)
            self._processes.append(process)
            process.start()
            theirs.close()

    def _collect(self, timeout_s: float) -> dict[int, _Reply]:
        replies: dict[int, _Reply] = {}
        deadline, times, computed_s = time.monotonic() + timeout_s, 1, self._computed_s()
        while len(replies) < self.world_size:
            pending = {c: rank for rank, c in enumerate(self._connections) if rank not in replies}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                before_s, computed_s = computed_s, self._computed_s()
                computes = any(computed_s[rank] - before_s[rank] > COMPUTES * timeout_s for rank in pending.values())
                if computes and times < MAX_TIMES and not any(reply.error for reply in replies.values()):
                    deadline, times = time.monotonic() + timeout_s, times + 1
                    continue
                replies |= {rank: _Reply(error="did not answer in time; it was ended") for rank in pending.values()}
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending[connection]
                replies[rank] = self._receive(rank)
                if replies[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _computed_s(self) -> list[float]:
        """Seconds of CPU that each rank has used with the processes that it started; 0: it has ended."""
        computed_s = [0.0] * self.world_size
        for rank, pid in enumerate(self.pids):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        times = each.cpu_times()
                        computed_s[rank] += times.user + times.system + times.children_user + times.children_system
        return computed_s

    def _receive(self, rank: int) -> _Reply:
        try:
            reply = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return _Reply(error=f"the process ended with exit code {self._processes[rank].exitcode}")
        assert isinstance(reply, _Reply)
        return reply


def _serve(connection: Connection, context: RankContext) -> None:
    """The life of a rank: run what arrives until the session is gone."""
    # The session's Ctrl-C is the session's: it ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(context.directory,), daemon=True).start()
    os.environ.clear()
    os.environ.update(context.environment)
    os.environ["MEGARL_DEVICE"] = context.device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # As Ray narrows what a rank sees.
    platform().select_devices([visible.split(",")[context.rank] if visible else str(context.rank)])
    os.environ.update(apply_environment())
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(payload, context))


def _answer(payload: bytes, context: RankContext) -> bytes:
    # Whatever a test's function raises is for the test to see.
    try:
        function, args, kwargs = pickle.loads(payload)
        return pickle.dumps(_Reply(value=function(context, *args, **kwargs)))
    except Exception:
        return pickle.dumps(_Reply(error=traceback.format_exc()))


def _exit_with_parent(directory: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
