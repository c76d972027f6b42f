"""Jobs on a real Slurm of two nodes: the scripts of slurm/, signals, requeues, and what a node is left with."""

from pathlib import Path

import pytest

from megarl.checkpoint import complete_steps
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import JOB_S, REPOSITORY, VENV, SlurmRun, job_options, left_behind, mid_run, wait_until
from tools.bench.kill_resume import differences

pytestmark = pytest.mark.timeout(400)


def test_near_its_limit_a_job_goes_back_into_the_queue_and_continues(
    lab: SlurmLab, inputs: Path, reference: SlurmRun
) -> None:
    """USR1 to the batch script, as before the time limit. Two nodes compute what one does, bit for bit."""
    run = SlurmRun(inputs=inputs, name="requeued", command="sft")
    job = run.submit(lab)
    mid_run(run)
    lab.query("scancel", "--batch", "--signal=USR1", str(job))
    ended = lab.wait(job, timeout_s=JOB_S)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), run.log()
    assert run.log().count("back into the queue") == 1
    assert differences(run, reference) == []
    assert left_behind(lab) == []


def test_a_cancelled_job_leaves_nothing(lab: SlurmLab, inputs: Path) -> None:
    run = SlurmRun(inputs=inputs, name="cancelled", command="sft")
    job = run.submit(lab)
    mid_run(run)
    assert len(lab.processes("node2", name="ray::")) > 0
    lab.query("scancel", str(job))
    wait_until(lambda: left_behind(lab) == [], "nothing left", timeout_s=30.0)
    assert lab.job(job)["JobState"] == "CANCELLED"
    assert complete_steps(run.paths.checkpoints)


def test_two_jobs_at_once(lab: SlurmLab, inputs: Path, reference: SlurmRun) -> None:
    """On the same nodes: each has Ray, ports, temporary files and shared memory of its own."""
    runs = [SlurmRun(inputs=inputs, name=f"both{i}", command="sft") for i in range(2)]
    jobs = [run.submit(lab) for run in runs]
    wait_until(lambda: all(lab.job(job)["JobState"] == "RUNNING" for job in jobs), "both jobs run at once")
    for run, job in zip(runs, jobs, strict=True):
        assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
        assert differences(run, reference) == []
    assert left_behind(lab) == []


def test_conversion_and_evaluation(lab: SlurmLab, inputs: Path) -> None:
    """Both scripts, one after the other; the evaluation has engines on both nodes."""
    converted, output = inputs / "converted", inputs / "convert.out"
    job = lab.sbatch(
        REPOSITORY / "slurm" / "convert.sbatch",
        *("hf-to-mcore", str(inputs / "model"), "--out", str(converted)),
        options=[*job_options(1, output)[:-2], f"--output={output}"],
        cwd=REPOSITORY,
        exports=VENV,
    )
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", output.read_text()
    assert (converted / "metadata.json").exists()
