"""What hostile scorers do to a pool: nothing beyond their own verdicts."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.rewards.verifier import JobOutcome, VerifierOptions, VerifierPool
from tests.helpers.verifier import bare, details_of, job, wait_for_end

# The soft limit is on CPU time, and a job on a busy machine must reach it before its deadline.
OPTIONS = VerifierOptions(num_workers=1, soft_limit_s=0.1, deadline_s=2.0, memory_limit_mib=256)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(OPTIONS) as pool:
        yield pool


@pytest.mark.parametrize(
    ("scorer", "outcome", "reason"),
    [
        ("loop", "timed_out", "interrupted after 0.1 s"),
        ("swallow_once", "timed_out", "interrupted after 0.1 s"),
        ("swallow", "timed_out", "killed after"),
        ("block_signals", "timed_out", "killed after"),
        ("sleep_for_ever", "timed_out", "killed after"),
        ("in_c", "timed_out", "killed after"),
        ("stop", "timed_out", "killed after"),
        ("exit_at_once", "crashed", "the worker process ended"),
        ("leave", "crashed", "the worker process ended"),
        ("segfault", "crashed", "the worker process ended"),
        ("eat_memory", "crashed", "MemoryError"),
        ("nest", "crashed", "RecursionError"),
        ("fail", "crashed", "ZeroDivisionError: by hand"),
        ("flood", "scored", ""),
        ("read_input", "scored", ""),
    ],
)
def test_a_hostile_scorer_costs_its_own_verdict_only(
    pool: VerifierPool, scorer: str, outcome: JobOutcome, reason: str
) -> None:
    # With a single worker, the job behind the hostile one needs the same worker or the one that takes its place.
    before, hostile, after = pool.score_all([job("same_text"), job(scorer), job("same_text")])
    assert (hostile.outcome, hostile.reason[: len(reason)]) == (outcome, reason)
    assert (hostile.reward is not None) == (outcome == "scored")
    assert hostile.seconds < OPTIONS.deadline_s + 5
    assert [before.outcome, after.outcome] == ["scored", "scored"]
    assert after.reward is not None
    assert after.reward.correct


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        ("\0\0\0\2{}", "the worker process sent what is not a reply"),
        ("\0\0\0\4oops", "the worker process sent what is not a reply"),
        ("\xff\xff\xff\xff", "a reply of 4294967295 bytes"),
        # An empty message says that execution begins; only once.
        ("\0\0\0\0", "the worker process spoke out of turn"),
    ],
)
def test_what_is_no_reply_ends_the_worker(pool: VerifierPool, garbage: str, reason: str) -> None:
    hostile, after = pool.score_all([job("garble", garbage), job("same_text")])
    assert hostile.outcome == "crashed"
    assert hostile.reason.startswith(reason)
    assert after.outcome == "scored"


def test_what_comes_after_a_workers_last_reply_is_ignored(pool: VerifierPool) -> None:
    reply = '{"reward": null, "outcome": "timed_out", "reason": "it says"}'
    hostile, after = pool.score_all([job("garble", f"\0\0\0{chr(len(reply))}{reply}" * 2), job("same_text")])
    assert (hostile.outcome, hostile.reason) == ("timed_out", "it says")
    assert after.outcome == "scored"


def test_a_job_that_changed_signals_does_not_spare_the_next_one(pool: VerifierPool) -> None:
    first, second = pool.score_all([job("change_signals"), job("loop")])
    assert (first.outcome, second.outcome) == ("scored", "timed_out")
    assert second.reason == "interrupted after 0.1 s of CPU time"


def test_a_worker_that_kept_memory_is_replaced() -> None:
    # A machine that is short of free pages takes its time to give so many.
    patient = bare(recycle_mib=192, soft_limit_s=20.0, deadline_s=60.0)
    with VerifierPool(patient) as pool:
        first, kept, second, third = pool.score_all(
            [job("process"), job("keep_memory", "200"), job("process"), job("process")]
        )
    assert kept.outcome == "scored"
    assert details_of(first)["pid"] != details_of(second)["pid"] == details_of(third)["pid"]


def test_a_worker_that_was_interrupted_is_replaced(pool: VerifierPool) -> None:
    first, _, second, third = pool.score_all([job("process"), job("loop"), job("process"), job("process")])
    assert details_of(first)["pid"] != details_of(second)["pid"] == details_of(third)["pid"]


def test_what_a_scorer_started_ends_with_its_worker(pool: VerifierPool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    [verdict] = pool.score_all([job("start_child", file=str(file))])
    assert verdict.outcome == "timed_out"
    wait_for_end(int(file.read_text()))


def test_workers_are_light(pool: VerifierPool) -> None:
    [verdict] = pool.score_all([job("process")])
    assert details_of(verdict)["heavy"] == 0
    # Half of what a process with torch takes.
    assert details_of(verdict)["resident_kib"] < 110 * 1024


def test_others_go_on_while_a_worker_is_replaced() -> None:
    """One of two workers meets a job after another that blocks signals; quick jobs wait for none of them."""
    with VerifierPool(bare(num_workers=2, soft_limit_s=0.2, deadline_s=2.0)) as pool:
        pool.score_all([job("same_text")] * 4)
        hostile = [pool.submit(job("block_signals")) for _ in range(3)]
        start = time.monotonic()
        # The first hostile job has one worker to itself, the second one the other: then both are replaced.
        quick = [pool.submit(job("same_text")) for _ in range(20)]
        assert all(future.result().outcome == "scored" for future in quick)
        # Three hostile jobs on two workers are over, at the latest, after two deadlines.
        assert time.monotonic() - start < 2 * 2.0 + 4
        assert [future.result().outcome for future in hostile] == ["timed_out"] * 3
        statistics = pool.statistics()
        assert (statistics.timed_out, statistics.correct, statistics.replaced) == (3, 24, 3)


OWNER = """
import os, signal, sys, time
from megarl.rewards.verifier import VerifierPool
from tests.helpers.verifier import job
def own():
    pool = VerifierPool()
    [verdict] = pool.score_all([job("process")])
    pool.submit(job("block_signals"))
    time.sleep(0.1)
    print(int(verdict.reward.details["pid"]), int(verdict.reward.details["parent"]), flush=True)
    {end}
    time.sleep(60)
own()
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)", "sys.exit(0)", "raise OSError"])
def test_workers_end_with_the_process_that_made_the_pool(end: str) -> None:
    code = OWNER.format(end=end)
    owner = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
    worker, server = map(int, owner.stdout.split())
    wait_for_end(worker)
    wait_for_end(server)
