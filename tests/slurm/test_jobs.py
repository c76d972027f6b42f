"""Jobs on a real Slurm of two nodes: side by side, at their time limit, and the other scripts of slurm/."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.host.exit_codes import EXIT_STOPPED
from megarl.host.signals import SAME_REQUEST_S
from megarl.launch.status import read_status
from megarl.record.checkpoints import complete_steps
from tests.helpers.kill_resume import differences
from tests.helpers.listeners import listeners_of
from tests.helpers.strangers import REFUSED, answers_to_strangers
from tests.helpers.waiting import wait_until
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import JOB_S, REPOSITORY, VENV, SlurmRun, job_options, left_behind, mid_run

pytestmark = pytest.mark.timeout(400)
# More than any machine makes in these tests.
MANY_STEPS = 36_000
# Processes of Ray that take commands on each node.
RAYS_OWN = ("gcs_server", "raylet", "RuntimeEnvAgent", "ray.util.client.server")
EVAL_SETTINGS = (
    "--num-samples=2",
    "--max-response-tokens=16",
    "data.max_prompt_tokens=64",
    "placement.trainer.num_nodes=2",
    "rollout.engine={num_engines: 2, kv_cache_mib: 64, block_size: 32, max_num_seqs: 64}",
    "cluster.object_store_mib=100",
)


def test_of_two_jobs_at_once_one_is_cancelled(lab: SlurmLab, inputs: Path, reference: SlurmRun) -> None:
    """On the same node: each has Ray, ports, temporary files and shared memory of its own. One leaves nothing there,
    the other goes on undisturbed; of one node alone, it listens on loopback, as a run without Slurm does.
    """
    cancelled = SlurmRun(inputs=inputs, name="cancelled", command="sft", more=(f"sft.total_steps={MANY_STEPS}",))
    job = cancelled.submit(lab)
    mid_run(cancelled)
    its = {"name": f"--run-id={job}-", "file": f"mr-{job}-"}
    assert len(left_behind(lab, **its)) >= 4
    # This machine can reach both nodes, but does not have the job's token.
    listeners = [each for each in listeners_of(f"{job}-0-0") if each.process in RAYS_OWN]
    answers = answers_to_strangers({f"{node}:{each.port}" for node in lab.nodes.values() for each in listeners})
    assert {address: found for address, found in answers.items() if found not in (*REFUSED, {"closed"})} == {}
    asking = {address.partition(":")[0] for address, found in answers.items() if found in REFUSED}
    assert asking == set(lab.nodes.values())
    kept = SlurmRun(inputs=inputs, name="kept", command="sft", nodes=1)
    other = kept.submit(lab, "--nodelist=node1")
    mid_run(kept)
    lab.query("scancel", str(job))
    # Stores, groups and Ray cannot be reached from other nodes.
    drivers = lab.processes("node1", name=f"run.name={kept.name}")
    listeners = listeners_of(f"{other}-0-0", *drivers)
    assert {each.address.removeprefix("::ffff:") for each in listeners} == {"127.0.0.1"}, listeners
    assert {"gcs_server", "raylet", "RankActor", "megarl.cli"} <= {each.process for each in listeners}
    left = partial(left_behind, lab, **its)
    wait_until(lambda: not left(), "the clean-up", timeout_s=30.0, seen=left)
    assert lab.wait(job, timeout_s=30.0)["JobState"] == "CANCELLED"
    assert complete_steps(cancelled.paths.checkpoints)
    assert lab.wait(other, timeout_s=JOB_S)["JobState"] == "COMPLETED", kept.log()
    assert differences(kept, reference) == []
    assert left_behind(lab) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_at_its_time_limit_a_job_goes_back_into_the_queue_and_continues(lab: SlurmLab, inputs: Path) -> None:
    """A limit of two minutes. Slurm looks at limits every half minute, and signals a check too early: after one. Once
    the job continues, a user cancels it, as its speed decides how often it would come back.
    """
    run = _many_steps(inputs, "limited")
    job = run.submit(lab, "--time=2", "--signal=B:USR1@31")
    wait_until(lambda: "continuing after step" in run.log(), "its second life", timeout_s=2 * JOB_S, seen=run.log)
    before = run.last_step()
    wait_until(lambda: run.last_step() > before, "its next step", timeout_s=2 * JOB_S, seen=run.log)
    lab.query("scancel", str(job))
    ended = lab.wait(job, timeout_s=JOB_S)
    assert ended["JobState"] == "CANCELLED", run.log()
    assert int(ended["Restarts"]) >= 1
    assert "stopped by SIGUSR1 after step" in run.log()
    assert [record.step for record in run.records()] == list(range(1, run.last_step() + 1))
    wait_until(lambda: not left_behind(lab), "the clean-up", timeout_s=30.0, seen=lambda: left_behind(lab))


@pytest.mark.parametrize("signal_name", [pytest.param("HUP", marks=pytest.mark.long), "TERM"])
def test_a_signal_of_a_user_stops_a_job_after_its_step(lab: SlurmLab, inputs: Path, signal_name: str) -> None:
    """With a checkpoint, and not back into the queue."""
    run = _many_steps(inputs, f"stopped-{signal_name}")
    job = run.submit(lab)
    mid_run(run)
    lab.query("scancel", "--batch", f"--signal={signal_name}", str(job))
    ended = lab.wait(job, timeout_s=JOB_S)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", f"{EXIT_STOPPED}:0", "0"), run.log()
    assert f"stopped by SIG{signal_name} after step" in run.log()
    assert complete_steps(run.paths.checkpoints) == [run.last_step()]
    assert read_status(run.paths.root).state == "stopped"
    assert left_behind(lab) == []


def test_a_second_signal_ends_a_job_whose_step_does_not_end(lab: SlurmLab, inputs: Path) -> None:
    """A rank hangs, so that the first signal waits for ever; the status tells the end."""
    run = _many_steps(inputs, "forced")
    job = run.submit(lab)
    mid_run(run)
    os.kill(lab.actors("node2", "RankActor")[0], signal.SIGSTOP)
    for num_signals in (1, 2):
        lab.query("scancel", "--batch", "--signal=TERM", str(job))
        wait_until(lambda n=num_signals: run.log().count("got SIGTERM") == n, "the signal", timeout_s=30.0)
        time.sleep(2 * SAME_REQUEST_S)
        assert lab.job(job)["JobState"] == "RUNNING" or num_signals == 2
    ended = lab.wait(job, timeout_s=JOB_S)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", f"{128 + signal.SIGTERM}:0"), run.log()
    assert read_status(run.paths.root).state == "stopped"
    assert left_behind(lab) == []


def _many_steps(inputs: Path, name: str) -> SlurmRun:
    """A run that writes no checkpoint but those that a signal asks for."""
    more = (f"sft.total_steps={MANY_STEPS}", f"checkpoint.every_steps={MANY_STEPS}")
    return SlurmRun(inputs=inputs, name=name, command="sft", more=more)


def test_conversion_and_evaluation(lab: SlurmLab, inputs: Path) -> None:
    """Both scripts at once; the evaluation has an engine on each node."""
    converted, results = inputs / "converted", inputs / "evaluated"
    convert = _submit(lab, inputs, "convert", 1, "hf-to-mcore", str(inputs / "model"), "--out", str(converted))
    given = ["--data", str(inputs / "data" / "val.parquet"), "--out", str(results)]
    evaluate = _submit(lab, inputs, "eval", 2, str(inputs / "model"), *given, *EVAL_SETTINGS)

    def has_engines() -> bool:
        assert lab.job(evaluate)["JobState"] in ("PENDING", "RUNNING"), (inputs / "eval.out").read_text()
        return all(lab.actors(node, "EngineActor") for node in lab.nodes)

    wait_until(has_engines, "an engine on each node", timeout_s=JOB_S)
    for job, name in ((convert, "convert"), (evaluate, "eval")):
        assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", (inputs / f"{name}.out").read_text()
    assert (converted / "metadata.json").exists()
    (table,) = pq.read_table(results / "table.parquet").to_pylist()
    answers = pq.read_table(results / "samples.parquet").to_pylist()
    # Of each of four prompts two samples and a greedy answer.
    assert (table["num_prompts"], len(answers)) == (4, 12)
    assert table["avg"] == sum(a["reward"] for a in answers if not a["greedy"]) / 8
    assert left_behind(lab) == []


def _submit(lab: SlurmLab, inputs: Path, script: str, nodes: int, *arguments: str) -> int:
    """Give one of the scripts to the lab; its output goes to SCRIPT.out."""
    return lab.sbatch(
        REPOSITORY / "slurm" / f"{script}.sbatch",
        *arguments,
        options=job_options(nodes, inputs / f"{script}.out"),
        cwd=REPOSITORY,
        exports=VENV,
    )
