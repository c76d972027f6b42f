"""Forked workers: all results, errors as errors, and no process left."""

import os
from pathlib import Path

import pytest

from megarl.convert.workers import WorkerPool
from megarl.errors import DataError, WorkerError


def square(task: int) -> tuple[int, int]:
    return task * task, os.getpid()


def fail(task: int) -> int:
    if task == 3:
        raise DataError("file x: row 7 is wrong")
    return task


def read_missing(task: int) -> int:
    return len(Path(f"/nonexistent/{task}").read_bytes())


def leave(task: int) -> int:
    if task == 3:
        os._exit(9)
    return task


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_task_has_a_result(num_workers: int) -> None:
    with WorkerPool(square, num_workers) as pool:
        results = list(pool.map_unordered(range(20)))
    assert sorted(value for value, _ in results) == [i * i for i in range(20)]
    # Every worker is given two of the first items, so all of them have a result.
    pids = {pid for _, pid in results}
    assert len(pids) == num_workers
    assert [pid for pid in pids if pid != os.getpid() and Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("num_workers", [2])
def test_errors_of_the_user_keep_their_message(num_workers: int) -> None:
    with WorkerPool(fail, num_workers) as pool, pytest.raises(DataError, match=r"^file x: row 7 is wrong$"):
        list(pool.map_unordered(range(9)))
    with WorkerPool(read_missing, num_workers) as pool, pytest.raises(DataError, match=r"No such file .* again"):
        list(pool.map_unordered(range(9)))


def test_a_process_that_dies_is_named() -> None:
    with WorkerPool(leave, 2) as pool, pytest.raises(WorkerError, match=r"ended with exit code 9; .* --workers"):
        list(pool.map_unordered(range(9)))
