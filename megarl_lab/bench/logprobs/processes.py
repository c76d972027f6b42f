"""The processes of one contender, a rank each, asked together. Nothing heavy is imported here: a rank sets its
environment before it imports torch."""

import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from megarl.errors import ConfigError, WorkerError
from megarl.host.device.platform import apply_environment, platform
from megarl_lab.bench.logprobs.records import RankSpec


class UnavailableError(ConfigError):
    """A contender's package cannot be imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    value: Any = None
    import_error: str | None = None
    failure: str | None = None


class Contestants:
    """Fresh processes that have loaded a contender; they end with the block."""

    def __init__(
        self, contender: str, *, world_size: int, device: str, dtype: str, main_grad: bool, kernels: str
    ) -> None:
        """Raises UnavailableError if the contender cannot be imported, WorkerError if a process fails otherwise."""
        self._contender = contender
        self._directory = tempfile.mkdtemp(prefix="megarl-bench-")
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        spawn = multiprocessing.get_context("spawn")
        for rank in range(world_size):
            spec = RankSpec(
                contender=contender,
                rank=rank,
                world_size=world_size,
                device=device,
                dtype=dtype,
                main_grad=main_grad,
                directory=self._directory,
                kernels=kernels,
            )
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, spec), daemon=True)
            self._connections.append(ours)
            self._processes.append(process)
            process.start()
            theirs.close()
        self.ask("load")

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Return what a method of `BenchRank` returns on every rank; a failure ends all of them."""
        payload = pickle.dumps((method, args))
        for connection in self._connections:
            connection.send_bytes(payload)
        return self._replies()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replies(self) -> list[Any]:
        """A reply of every rank. Once one has failed the others, which wait for it, are not waited for."""
        replies: dict[int, Any] = {}
        try:
            while len(replies) < len(self._connections):
                pending = {c: rank for rank, c in enumerate(self._connections) if rank not in replies}
                for connection in wait(list(pending)):
                    assert isinstance(connection, Connection)
                    rank = pending[connection]
                    replies[rank] = self._receive(rank)
        except BaseException:
            self.close()
            raise
        return [replies[rank] for rank in range(len(replies))]

    def _receive(self, rank: int) -> Any:
        try:
            reply = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            self._processes[rank].join()
            exit_code = self._processes[rank].exitcode
            raise WorkerError(
                f"{self._contender}, rank {rank}: the process ended with exit code {exit_code}; its traceback is "
                f"above, and -9 may mean that memory ran out"
            ) from error
        if reply.import_error is not None:
            raise UnavailableError(
                f"{self._contender} cannot be imported ({reply.import_error}); install what it needs into the folder "
                f"of --kernels, or leave it out of --contenders"
            )
        if reply.failure is not None:
            raise WorkerError(f"{self._contender}, rank {rank}: {reply.failure}")
        return reply.value


def _serve(connection: Connection, spec: RankSpec) -> None:
    """The life of a rank."""
    threading.Thread(target=_exit_with_parent, args=(spec.directory,), daemon=True).start()
    os.environ["MEGARL_DEVICE"] = spec.device
    os.environ["OMP_NUM_THREADS"] = "1"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    platform().select_devices([visible.split(",")[spec.rank] if visible else str(spec.rank)])
    apply_environment()
    from megarl_lab.bench.logprobs.rank import BenchRank

    rank = BenchRank(spec)
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_answer(getattr(rank, method), arguments)))


def _answer(method: Callable[..., Any], arguments: Sequence[Any]) -> _Reply:
    try:
        return _Reply(value=method(*arguments))
    except ImportError as error:
        return _Reply(import_error=f"{type(error).__name__}: {error}")
    # Whatever it is ends this contender, and the others go on.
    except Exception as error:
        traceback.print_exc()
        return _Reply(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _exit_with_parent(directory: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
