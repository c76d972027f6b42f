"""The pool that the multi-rank tests run on: results, errors, time-outs, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.rank_pool import RankContext, RankError, RankPool
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).parents[2]


def add(context: RankContext, left: int, *, right: int) -> tuple[int, int]:
    return context.rank, left + right


def environment(context: RankContext) -> tuple[bool, int]:
    import torch

    return {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"} <= os.environ.keys(), torch.get_num_threads()


def directory(context: RankContext) -> str:
    return context.directory


def divide_by_rank(context: RankContext) -> float:
    return 1 / context.rank


def hang_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        time.sleep(600)


def compute_on_rank_1(context: RankContext, seconds: float) -> None:
    end = time.monotonic() + seconds
    while context.rank == 1 and time.monotonic() < end:
        pass


def end_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        os._exit(7)


def fail_while_rank_1_waits(context: RankContext) -> None:
    if context.rank == 0:
        raise ValueError("rank 0 is unhappy")
    time.sleep(600)


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    # The second: the process ended between the opening and the reading of its file.
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def test_results_come_by_rank_from_the_same_processes(pool: RankPool) -> None:
    assert pool.run(add, 1, right=2) == [(0, 3), (1, 3)]
    pids = pool.pids
    assert pool.run(add, 2, right=2) == [(0, 4), (1, 4)]
    assert pool.pids == pids
    # The environment is set, and was when torch was imported: it reads OMP_NUM_THREADS only then.
    assert pool.run(environment) == [(True, 1)] * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (divide_by_rank, r"(?s)rank 0: Traceback.*in divide_by_rank.*ZeroDivisionError"),
        (end_on_rank_1, "rank 1: the process ended with exit code 7"),
        (fail_while_rank_1_waits, r"(?s)rank 0: .*rank 0 is unhappy.*rank 1: did not answer in time"),
    ],
)
def test_an_error_is_raised_here_and_the_next_call_gets_new_processes(
    pool: RankPool, function: object, message: str
) -> None:
    pool.run(add, 0, right=0)
    pids = pool.pids
    with pytest.raises(RankError, match=message):
        pool.run(function)  # type: ignore[arg-type]
    assert not any(is_alive(pid) for pid in pids)
    assert pool.run(add, 1, right=2) == [(0, 3), (1, 3)]


def test_a_hanging_rank_is_ended(pool: RankPool) -> None:
    pool.run(add, 0, right=0)
    pids = pool.pids
    with pytest.raises(RankError, match="rank 1: did not answer in time"):
        pool.run(hang_on_rank_1, timeout_s=0.5)
    assert not any(is_alive(pid) for pid in pids)


def test_a_rank_that_still_computes_has_not_hung(pool: RankPool) -> None:
    pool.run(add, 0, right=0)
    assert pool.run(compute_on_rank_1, 3.0, timeout_s=2.0) == [None, None]
    with pytest.raises(RankError, match="rank 1: did not answer in time"):
        pool.run(compute_on_rank_1, 600.0, timeout_s=0.5)


HANGING_SESSION = """
import signal, threading, time
from tests.distributed.test_rank_pool import directory, hang_on_rank_1
from tests.helpers import rank_pool
from tests.helpers.rank_pool import RankPool

# These ranks compute nothing.
rank_pool.PRELOAD.clear()

if __name__ == "__main__":
    # A background job of a shell ignores it, and so would what that job starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with RankPool(2) as pool:
        [path, _] = pool.run(directory)
        print(*pool.pids, path, flush=True)
        pool.run(hang_on_rank_1)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_its_session(tmp_path: Path, signum: int) -> None:
    script = tmp_path / "session.py"
    script.write_text(HANGING_SESSION)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as session:
        assert session.stdout is not None
        *numbers, path = session.stdout.readline().split()
        pids = [int(number) for number in numbers]
        assert len(pids) == 2
        assert Path(path).is_dir()
        assert all(is_alive(pid) for pid in pids)
        session.send_signal(signum)
        session.wait(timeout=30)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), f"the end of processes {pids}", timeout_s=30)
    assert not Path(path).exists()
