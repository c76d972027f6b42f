"""What a run does when something under it fails: it says what and where within seconds, and goes on by itself."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from megarl.checkpoint import last_checkpoint
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import JOB_S, SlurmRun, left_behind, mid_run, noticed, wait_until
from tools.bench.kill_resume import differences

pytestmark = pytest.mark.timeout(400)
LINK_DOWN_S = 20.0
# A hung process is only known by its silence.
IMPATIENT = ("rollout.timeout_s=15", "cluster.collective_timeout_s=60")


def test_after_each_failure_a_run_starts_again_from_its_last_checkpoint(
    lab: SlurmLab, inputs: Path, reference: SlurmRun
) -> None:
    """Its driver is killed, then a rank, then nothing."""
    run = SlurmRun(inputs=inputs, name="killed", command="sft")
    job = run.submit(lab)
    mid_run(run)
    os.kill(lab.processes("node1", name="megarl.cli")[0], signal.SIGKILL)
    noticed(run, "the run failed with exit code 137; 2 restart")
    wait_until(lambda: "attempt 1 on node1, node2" in run.log(), "the next attempt")
    mid_run(run, after=run.last_step() + 2)
    os.kill(lab.processes("node2", name="ray::RankActor")[0], signal.SIGKILL)
    noticed(run, "trainer rank 1 (node2) died")
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
    assert "attempt 2 on node1, node2" in run.log()
    assert differences(run, reference) == []
    assert left_behind(lab) == []


def test_a_hung_rank_is_named_with_its_state_and_what_the_others_wait_in(lab: SlurmLab, inputs: Path) -> None:
    """And with no restarts left the run ends with that line, and a checkpoint to resume."""
    run = SlurmRun(inputs=inputs, name="hung", command="sft", more=IMPATIENT)
    job = run.submit(lab, max_restarts=0)
    mid_run(run)
    os.kill(lab.processes("node2", name="ray::RankActor")[0], signal.SIGSTOP)
    ended = lab.wait(job, timeout_s=JOB_S)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    (line,) = (line for line in run.log().splitlines() if line.startswith("error:"))
    assert re.search(r"within 15 s \(.*trainer rank 1 \(node2\) is stopped", line), line
    assert re.search(r"trainer rank 0 \(node1\) (waits in \w+, called|is) at megarl/", line), line
    assert list(run.paths.logs.rglob("stacks-*.txt"))
    assert last_checkpoint(run.paths.checkpoints) is not None
    assert left_behind(lab) == []


def test_a_lost_node_is_named_and_the_job_goes_on_when_it_is_back(
    lab: SlurmLab, inputs: Path, reference: SlurmRun
) -> None:
    """The second node loses power. Slurm takes the job back into the queue by itself; the node returns."""
    run = SlurmRun(inputs=inputs, name="lost-node", command="sft")
    job = run.submit(lab)
    mid_run(run)
    lab.kill_node("node2")
    noticed(run, "trainer rank 1 (node2) died")
    lab.start_node("node2")
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
    assert differences(run, reference) == []
    assert left_behind(lab) == []


def test_a_cut_link_is_noticed_and_the_run_goes_on_once_it_is_mended(
    lab: SlurmLab, inputs: Path, reference: SlurmRun
) -> None:
    """Whether Slurm has given the node up by then, and takes the job back into the queue, is a matter of luck."""
    run = SlurmRun(inputs=inputs, name="cut-link", command="sft")
    job = run.submit(lab, max_restarts=4)
    mid_run(run)
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


def test_a_node_that_never_comes_up_is_named_and_the_job_goes_on_once_it_does(lab: SlurmLab, inputs: Path) -> None:
    """Slurm believes in it, but nothing reaches it."""
    run = SlurmRun(
        inputs=inputs, name="absent", command="sft", more=("sft.total_steps=1", "actor.optimizer.warmup_steps=0")
    )
    lab.set_link("node2", "down")
    try:
        job = run.submit(lab, max_restarts=4)
        wait_until(lambda: "attempt 0" in run.log(), "the first attempt")
        noticed(run, "no sign of life from node2")
    finally:
        lab.set_link("node2", "up")
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
    assert left_behind(lab) == []
