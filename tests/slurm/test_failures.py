"""What a run does when something under it fails: it says what and where within seconds, and goes on by itself."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from megarl.record.checkpoints import last_checkpoint
from tests.helpers.kill_resume import differences, differing_metrics
from tests.helpers.waiting import wait_until
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import JOB_S, SlurmRun, left_behind, mid_run, noticed

pytestmark = pytest.mark.timeout(400)
# A host counts as lost well before its link is up again.
LOST_S, LINK_DOWN_S = 6.0, 20.0
# A hung process is only known by its silence.
IMPATIENT = ("rollout.timeout_s=15", "cluster.collective_timeout_s=60")


def test_after_each_failure_a_run_starts_again_until_no_restart_is_left(
    lab: SlurmLab, inputs: Path, reference: SlurmRun
) -> None:
    """Its driver is killed, then a rank hangs: named with its state and what the others wait in. The run ends with
    that line, and a checkpoint to resume. Until then it has computed what a run without failures does.
    """
    run = SlurmRun(inputs=inputs, name="failing", command="sft", more=IMPATIENT)
    job = run.submit(lab, max_restarts=1)
    mid_run(run)
    os.kill(lab.processes("node1", name="megarl.cli")[0], signal.SIGKILL)
    noticed(run, "the run failed with exit code 137; 1 restart")
    mid_run(run, after=run.last_step() + 2)
    num_errors = run.log().count("error:")
    os.kill(lab.actors("node2", "RankActor")[0], signal.SIGSTOP)
    ended = lab.wait(job, timeout_s=JOB_S)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    assert [f"attempt {i} on node1, node2" in run.log() for i in range(3)] == [True, True, False]
    (line,) = [line for line in run.log().splitlines() if line.startswith("error:")][num_errors:]
    assert re.search(r"within 15 s \(.*trainer rank 1 \(node2\) is stopped", line), line
    # A rank that has written its part of a checkpoint has answered already, and a stopped one cannot write its stacks.
    if re.search(r"no answer from .*trainer rank 0 \(node1\).* within 15 s", line):
        assert re.search(r"trainer rank 0 \(node1\) (waits in \w+, called|is) at megarl/", line), line
        assert list(run.paths.logs.rglob("stacks-*.txt"))
    assert last_checkpoint(run.paths.checkpoints) is not None
    assert left_behind(lab) == []
    assert run.last_step() >= 4
    assert differing_metrics(run, reference) == []


def test_a_job_continues_after_its_time_limit_and_after_a_lost_node(
    lab: SlurmLab, inputs: Path, reference: SlurmRun
) -> None:
    """USR1 to the batch script, as before the time limit, puts it back into the queue. Later the second node loses
    power and comes back at once; whether the job is queued again is Slurm's. Two nodes compute what one does.
    """
    run = SlurmRun(inputs=inputs, name="requeued", command="sft")
    job = run.submit(lab)
    mid_run(run)
    lab.query("scancel", "--batch", "--signal=USR1", str(job))
    wait_until(lambda: "continuing after step" in run.log(), "the job's second life", timeout_s=JOB_S, seen=run.log)
    assert lab.job(job)["Restarts"] == "1"
    assert run.log().count("back into the queue") == 1
    mid_run(run, after=run.last_step() + 2)
    lab.kill_node("node2")
    noticed(run, "trainer rank 1 (node2) died")
    lab.start_node("node2")
    ended = lab.wait(job, timeout_s=JOB_S)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), run.log()
    assert differences(run, reference) == []
    assert left_behind(lab) == []


@pytest.mark.long
def test_a_node_out_of_reach_is_noticed_at_the_start_and_in_mid_run(
    lab: SlurmLab, inputs: Path, reference: SlurmRun
) -> None:
    """Slurm believes in the node. Whether it gives it up while the link is down, and takes the job back into the
    queue, is a matter of luck; the run goes on once the link is mended.
    """
    quick = (f"cluster.node_timeout_s={LOST_S:g}",)
    run = SlurmRun(inputs=inputs, name="out-of-reach", command="sft", more=quick)
    lab.set_link("node2", "down")
    try:
        job = run.submit(lab, max_restarts=6)
        wait_until(lambda: "attempt 0" in run.log(), "the first attempt", timeout_s=JOB_S, seen=run.log)
        noticed(run, "no sign of life from node2")
    finally:
        lab.set_link("node2", "up")
    wait_until(lambda: run.last_step() >= 2, "step 2", timeout_s=JOB_S, seen=run.last_step)
    lab.set_link("node2", "down")
    mended = time.monotonic() + LINK_DOWN_S
    try:
        noticed(run, "trainer rank 1 (node2) died")
        time.sleep(max(0.0, mended - time.monotonic()))
    finally:
        lab.set_link("node2", "up")
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
    assert differences(run, reference) == []
    assert left_behind(lab) == []
