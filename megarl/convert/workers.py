"""Map a function over items in forked worker processes, which end when the process that started them ends.

The pools of `concurrent.futures` do not say how a worker that died has ended, and wait for tasks when they are closed.
"""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, Self, TypeVar

import torch

from megarl.errors import DataError, WorkerError

Item = TypeVar("Item")
Result = TypeVar("Result")
# A worker holds the task it works on and the next one, so that it never waits for the parent.
_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class _Failure:
    """A worker's reply that carries the message of a DataError, which the parent process raises again."""

    message: str


class _Worker(Generic[Item, Result]):
    def __init__(self, function: Callable[[Item], Result], others: "Sequence[_Worker[Item, Result]]") -> None:
        fork = multiprocessing.get_context("fork")
        self.connection, theirs = fork.Pipe()
        inherited = [self.connection, *(other.connection for other in others)]
        self.process = fork.Process(target=_serve, args=(function, theirs, inherited), daemon=True)
        self.process.start()
        theirs.close()
        self.num_pending = 0

    def give(self, task: Item) -> None:
        self.connection.send(task)
        self.num_pending += 1

    def take(self) -> Result:
        try:
            result: Result | _Failure = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise WorkerError(
                f"a converting process ended with exit code {self.process.exitcode}; give it memory, or fewer "
                f"--workers, and run the command again to continue"
            ) from None
        if isinstance(result, _Failure):
            raise DataError(result.message)
        self.num_pending -= 1
        return result


class WorkerPool(Generic[Item, Result]):
    """A pool of forked processes that run one function; a pool of one worker runs the function in this process."""

    def __init__(self, function: Callable[[Item], Result], num_workers: int) -> None:
        self._function = function
        self._workers: list[_Worker[Item, Result]] = []
        if num_workers > 1:
            for _ in range(num_workers):
                self._workers.append(_Worker(function, self._workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def map_unordered(self, tasks: Sequence[Item]) -> Iterator[Result]:
        """Run the function on all tasks and yield the results in the order in which they become ready.

        Raises:
            DataError: a task raised DataError or OSError.
            WorkerError: a worker process died.
        """
        if not self._workers:
            yield from (_run(self._function, task) for task in tasks)
            return
        queue = iter(tasks)
        by_connection = {worker.connection: worker for worker in self._workers}
        for worker, task in zip(self._workers * _IN_FLIGHT, queue, strict=False):
            worker.give(task)
        while any(worker.num_pending for worker in self._workers):
            for ready in wait([worker.connection for worker in self._workers if worker.num_pending]):
                assert isinstance(ready, Connection)
                worker = by_connection[ready]
                yield worker.take()
                for task in itertools.islice(queue, 1):
                    worker.give(task)


def _run(function: Callable[[Item], Result], task: Item) -> Result:
    try:
        return function(task)
    except OSError as error:
        raise DataError(f"reading or writing failed: {error}; check the storage and run the command again") from error


def _serve(function: Callable[[Item], Result], connection: Connection, inherited: Sequence[Connection]) -> None:
    for other in inherited:
        other.close()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # A forked process must not use OpenMP's threads, which existed only in the parent.
    torch.set_num_threads(1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            result: Result | _Failure = _run(function, task)
        except DataError as error:
            result = _Failure(str(error))
        connection.send(result)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
