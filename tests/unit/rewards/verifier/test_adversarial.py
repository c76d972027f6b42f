"""Answers made to hang, crash or bloat a verifier: the first few of `megarl_lab.bench.verify_adversarial`."""

from dataclasses import replace

from megarl.rewards.verifier import VerifierPool
from megarl_lab.bench.verify_adversarial import KINDS, OPTIONS, checkpoint, fork_server, run
from tests.helpers.waiting import wait_until

COUNT = 96


def test_every_verdict_comes_in_time_and_nothing_is_left() -> None:
    options = replace(OPTIONS, num_workers=4, soft_limit_s=0.05, deadline_s=0.5)
    with VerifierPool(options) as pool:
        verdicts, checkpoints, caller = run(pool, COUNT, seed=1)
        statistics = pool.statistics()

        # A worker that has been replaced may take a moment to end.
        def num_workers() -> int:
            return checkpoint(COUNT, fork_server()).num_workers

        expected = options.num_workers + options.num_spares
        wait_until(lambda: num_workers() == expected, f"{expected} workers", timeout_s=5.0, seen=num_workers)
    assert set(verdicts) == {"hypothesis", *KINDS}
    judged = [verdict for found in verdicts.values() for verdict in found]
    assert len(judged) == statistics.jobs == COUNT
    assert all(verdict.seconds < options.deadline_s + 5 for verdict in judged)
    # The input is what it claims to be.
    assert statistics.timed_out > 0
    # An upper bound of what all of them may hold; without replacement a single one would get there.
    assert all(each.workers_mib < 6 * options.recycle_mib for each in checkpoints)
    # Less could not be told from a busy machine.
    assert caller.longest_submit < 1.0
    assert checkpoints[-1].parent_mib < checkpoints[0].parent_mib + 64
