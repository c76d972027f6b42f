"""What a verifier pool promises those who use it."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import ConfigError, DataError, NonFiniteError, WorkerError
from megarl.rewards.verifier import JobResult, VerifierJob, VerifierOptions, VerifierPool, VerifierStatistics
from megarl.types import Reward
from tests.helpers.verifier import SCORERS, bare, details_of, is_alive, job, wait_for_end


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(bare(num_workers=2)) as pool:
        yield pool


def test_verdicts_come_in_the_order_of_the_jobs(pool: VerifierPool) -> None:
    """The first jobs take longest, so they are over last."""
    jobs = [job("sleep", "0.3"), job("sleep", "0.1"), *[job("length", "x" * n, "x") for n in range(1, 40)]]
    verdicts = pool.score_all(jobs)
    assert [verdict.outcome for verdict in verdicts] == ["scored"] * 41
    assert [verdict.reward.score for verdict in verdicts if verdict.reward][2:] == list(range(1, 40))


def test_a_verdict_has_the_scorers_reward_and_the_time_it_took(pool: VerifierPool) -> None:
    [verdict, slow] = pool.score_all([job("same_text"), job("sleep", "0.2")])
    reward = Reward(score=1.0, correct=True, details={"parse_failed": 0.0})
    assert verdict == JobResult(reward=reward, outcome="scored", seconds=verdict.seconds)
    assert verdict.seconds > 0
    assert slow.seconds >= 0.2


def test_the_counts_are_apart() -> None:
    jobs = [job("same_text"), job("same_text", "b"), job("same_text", "c"), job("same_text", ""), job("loop")]
    options = bare(num_workers=2, soft_limit_s=0.2, max_response_chars=10)
    with VerifierPool(options) as pool:
        assert pool.statistics() == VerifierStatistics()
        verdicts = pool.score_all([*jobs, job("exit_at_once"), job("length", "x" * 11, "x")])
        counts = pool.statistics()
    outcomes = ["scored", "scored", "scored", "parse_failed", "timed_out", "crashed", "scored"]
    assert [verdict.outcome for verdict in verdicts] == outcomes
    assert verdicts[3].reward == Reward(score=0.0, correct=False, details={"parse_failed": 1.0})
    assert (counts.correct, counts.wrong, counts.parse_failed) == (2, 2, 1)
    assert (counts.timed_out, counts.crashed, counts.shortened, counts.jobs) == (1, 1, 1, 7)
    # After the one that was interrupted and the one that exited.
    assert counts.replaced == 2
    assert counts.max_seconds == max(verdict.seconds for verdict in verdicts)
    assert counts.seconds == pytest.approx(sum(verdict.seconds for verdict in verdicts))


def test_of_a_long_response_the_end_is_judged() -> None:
    with VerifierPool(bare(max_response_chars=3)) as pool:
        [verdict] = pool.score_all([job("same_text", "abcdef", "def")])
    assert verdict.reward is not None
    assert verdict.reward.correct


def test_the_clock_starts_at_execution() -> None:
    """Four jobs wait for a single worker, longer than any of them may take."""
    with VerifierPool(bare(soft_limit_s=0.5, deadline_s=2.0)) as pool:
        verdicts = pool.score_all([job("sleep", "0.6")] * 4)
    assert [verdict.outcome for verdict in verdicts] == ["scored"] * 4
    assert all(verdict.seconds < 2.0 for verdict in verdicts)


def test_the_soft_limit_is_on_cpu_time() -> None:
    """Who only waits, as on a busy machine, is not interrupted."""
    with VerifierPool(bare(soft_limit_s=0.1, deadline_s=6.0)) as pool:
        waits, works = pool.score_all([job("sleep", "0.5"), job("loop")])
    assert (waits.outcome, works.outcome) == ("scored", "timed_out")
    assert works.reason == "interrupted after 0.1 s of CPU time"


def test_the_import_of_a_scorer_is_not_on_the_clock(tmp_path: Path) -> None:
    """A scorer in a file, which takes longer to import than a job may take."""
    file = tmp_path / "slow_to_import.py"
    file.write_text(
        "import time\nfrom megarl.types import Reward\ntime.sleep(1.8)\n"
        "def scorer(response, ground_truth, extra_info, *, worth):\n"
        "    return Reward(score=worth, correct=response == ground_truth)\n"
    )
    slow = VerifierJob(
        data_source="test", response="a", ground_truth="a", function=f"{file}:scorer", arguments={"worth": 0.5}
    )
    with VerifierPool(bare(soft_limit_s=0.2, deadline_s=1.5)) as pool:
        verdicts = pool.score_all([slow, slow])
    assert [verdict.reward for verdict in verdicts] == [Reward(score=0.5, correct=True)] * 2
    assert all(verdict.seconds < 1.5 for verdict in verdicts)


def test_submitting_never_waits() -> None:
    """Not for the first worker to be ready, and not for one that does not read what it is sent."""
    big = job("process", "x" * 200_000)
    start = time.monotonic()
    with VerifierPool(bare()) as pool:
        futures = [pool.submit(job("process"))]
        submitted = time.monotonic()
        worker = details_of(futures[0].result())["pid"]
        assert submitted - start < 0.5 * (time.monotonic() - start)
        os.kill(int(worker), signal.SIGSTOP)
        # Pipes hold less than that.
        futures = [pool.submit(big) for _ in range(20)]
        # Its worker is only given up after three seconds.
        assert not futures[0].done()
        assert [future.result().outcome for future in futures] == ["timed_out"] + ["scored"] * 19


@pytest.mark.parametrize(
    ("scorer", "error", "message"),
    [
        ("bad_truth", DataError, "ground truth is 'a'"),
        ("a_number", ConfigError, f"scorer '{SCORERS}:a_number' returned float, expected a megarl.types.Reward"),
        ("not_finite", NonFiniteError, f"scorer '{SCORERS}:not_finite' returned a score of nan"),
        ("missing", ConfigError, f"'{SCORERS}' has no function 'missing'"),
    ],
)
def test_mistakes_that_are_no_responses_are_raised(
    pool: VerifierPool, scorer: str, error: type[Exception], message: str
) -> None:
    future, after = pool.submit(job(scorer)), pool.submit(job("same_text"))
    with pytest.raises(error) as raised:
        future.result()
    assert message in str(raised.value)
    assert after.result().outcome == "scored"


@pytest.mark.parametrize("function", ["no.such.module:function", "no_such_file.py:function", "function"])
def test_a_scorer_that_cannot_be_imported_is_raised(pool: VerifierPool, function: str) -> None:
    with pytest.raises(ConfigError, match="function"):
        pool.score_all([VerifierJob(data_source="test", response="", ground_truth="", function=function)])


def test_what_cannot_be_sent_is_refused_at_once(pool: VerifierPool) -> None:
    unsendable = VerifierJob(
        data_source="test", response="", ground_truth="", function="m:f", extra_info={"lock": threading.Lock()}
    )
    with pytest.raises(TypeError, match="pickle"):
        pool.submit(unsendable)


def test_threads_share_a_pool(pool: VerifierPool) -> None:
    def score(n: int) -> list[float]:
        verdicts = pool.score_all([job("length", "x" * (100 * n + i), "x") for i in range(1, 21)])
        return [verdict.reward.score for verdict in verdicts if verdict.reward]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(score, range(8))) == [[100 * n + i for i in range(1, 21)] for n in range(8)]


def test_a_pool_outlives_the_thread_that_made_it() -> None:
    made: list[VerifierPool] = []
    thread = threading.Thread(target=lambda: made.append(VerifierPool(bare())))
    thread.start()
    thread.join()
    with made[0] as pool:
        [first] = pool.score_all([job("process")])
        [second] = pool.score_all([job("process")])
    assert details_of(first)["pid"] == details_of(second)["pid"]


def test_a_job_can_be_cancelled_until_it_runs() -> None:
    with VerifierPool(bare()) as pool:
        running = pool.submit(job("sleep", "0.3"))
        waiting = pool.submit(job("same_text"))
        assert waiting.cancel()
        assert running.result().outcome == "scored"
        assert pool.submit(job("same_text")).result().outcome == "scored"
        assert pool.statistics().jobs == 2
    with pytest.raises(CancelledError):
        waiting.result()


def test_closing_ends_the_workers_and_what_waits() -> None:
    pool = VerifierPool(bare())
    worker = details_of(pool.submit(job("process")).result())
    running, waiting = pool.submit(job("block_signals")), pool.submit(job("same_text"))
    pool.close()
    pool.close()
    assert not is_alive(int(worker["pid"]))
    assert not is_alive(int(worker["parent"]))
    for future in (running, waiting):
        with pytest.raises(RuntimeError, match="the verifier pool was closed before the job was judged"):
            future.result(timeout=0)
    with pytest.raises(RuntimeError, match="the verifier pool is closed"):
        pool.submit(job("same_text"))


def test_a_pool_that_is_dropped_ends() -> None:
    pool = VerifierPool(bare())
    worker = details_of(pool.submit(job("process")).result())
    del pool
    wait_for_end(int(worker["parent"]))


def test_a_callback_may_close_the_pool() -> None:
    pool = VerifierPool(bare())
    worker: dict[str, Any] = {}

    def close(future: Future[JobResult]) -> None:
        worker.update(details_of(future.result()))
        pool.close()

    pool.submit(job("process")).add_done_callback(close)
    pool._supervisor._thread.join(30)
    wait_for_end(int(worker["parent"]))


@pytest.mark.parametrize("victim", ["pid", "parent"])
def test_what_was_killed_from_outside_is_replaced(victim: str) -> None:
    """A worker, and the fork server with all its workers."""
    with VerifierPool(bare(num_spares=0)) as pool:
        before = details_of(pool.submit(job("process")).result())
        os.kill(int(before[victim]), signal.SIGKILL)
        wait_for_end(int(before["pid"]))
        # The first job may have been sent to a worker whose end was not known yet.
        pool.submit(job("process")).result()
        after = details_of(pool.submit(job("process")).result())
    assert after["pid"] != before["pid"]


def test_workers_that_cannot_start_are_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with VerifierPool(VerifierOptions(num_workers=1, preload=("no_such_module",))) as pool:
        future = pool.submit(job("same_text"))
        with pytest.raises(WorkerError, match="check that the names in verifier preload can be imported"):
            future.result()
        with pytest.raises(RuntimeError, match="the verifier pool is closed"):
            pool.submit(job("same_text"))
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_a_fork_server_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with VerifierPool(bare()) as pool, pytest.raises((FileNotFoundError, RuntimeError)):
        pool.submit(job("same_text")).result()


def test_what_starts_threads_cannot_be_preloaded(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        VerifierPool(VerifierOptions(num_workers=1, preload=(f"{SCORERS}:start_thread",))) as pool,
        pytest.raises(WorkerError),
    ):
        pool.submit(job("same_text")).result()
    assert f"'{SCORERS}:start_thread' started threads, which do not survive a fork" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "verifier num_workers is 0, expected at least 1"),
        ({"memory_limit_mib": 8}, "verifier memory_limit_mib is 8, expected at least 64"),
        ({"soft_limit_s": 3.0}, "expected 0 < soft_limit_s < deadline_s < start_limit_s"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerifierOptions(**options)


def test_file_descriptors_are_given_back() -> None:
    """What earlier tests left may end meanwhile, so only what is new counts."""

    def held() -> set[object]:
        found = set[object](threading.enumerate())
        for number in os.listdir("/proc/self/fd"):
            # The listing's own descriptor is closed by now.
            with contextlib.suppress(FileNotFoundError):
                found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        return found

    before = held()
    with VerifierPool(bare(soft_limit_s=0.05, deadline_s=0.1)) as pool:
        pool.score_all([job("block_signals"), job("loop"), job("exit_at_once")] * 3)
        assert len(held() - before) > 1
    assert held() - before == set()
