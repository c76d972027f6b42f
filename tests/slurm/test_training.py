"""Reinforcement learning over two nodes: the same results as on one, and what happens when an engine dies."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from megarl.rollout.replay import read_record, record_path
from tests.helpers.kill_resume import MEGARL, SCHEDULES, differences
from tests.helpers.rewriting import NOTES, rewriting_settings
from tests.helpers.waiting import wait_until
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import (
    JOB_S,
    REPOSITORY,
    VENV,
    SlurmRun,
    finish_here,
    job_options,
    left_behind,
    mid_run,
    noticed,
)

pytestmark = pytest.mark.timeout(400)
STEPS = 3
# Tensor parallelism within a node, data parallelism across, and an engine beside the ranks of each.
LAYOUT = ("actor.layout.tp=2", "actor.layout.sequence_parallel=true", "actor.layout.dp=2")
ENGINES = (
    "placement.mode=split",
    "placement.engines.num_nodes=2",
    "rollout.engine.num_engines=2",
    "sync.verify=true",
    "rollout.record=true",
)
ONE_RANK = ("actor.layout.tp=1", "actor.layout.sequence_parallel=false", "actor.layout.dp=1")
ASYNC_STEPS = 12
ASYNC = (
    *SCHEDULES["async"],
    *(f"trainer.total_steps={ASYNC_STEPS}", "data.val=[]", "sync.verify=true"),
)
RL = (*LAYOUT, "data.val=[]", f"trainer.total_steps={STEPS}", "actor.optimizer.warmup_steps=0")
# All samples are conversations that fork; their environments run in two processes.
TREES = (*rewriting_settings(), "environment.hosts=2")


@pytest.fixture(scope="module")
def two_nodes(lab: SlurmLab, inputs: Path) -> SlurmRun:
    """The uninterrupted run."""
    run = SlurmRun(inputs=inputs, name="two-nodes", more=(*RL, *ENGINES, *TREES))
    job = run.submit(lab)
    mid_run(run, after=1)
    for node in lab.nodes:
        assert len(lab.actors(node, "RankActor")) == 2
        assert len(lab.actors(node, "EngineActor")) == 1
    # Environment workers are with the driver.
    assert [len(lab.actors(node, "EnvironmentWorkerActor")) for node in lab.nodes] == [2, 0]
    ended = lab.wait(job, timeout_s=JOB_S)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), run.log()
    assert left_behind(lab) == []
    return run


def test_engines_of_both_nodes_follow_the_trainer(two_nodes: SlurmRun) -> None:
    """They sample each step with the weights of the last."""
    require_synced(two_nodes)
    for step in range(1, STEPS + 1):
        rollout = read_record(record_path(two_nodes.paths.records, step))
        assert {int(v) for s in rollout.samples for v in s.segments[-1].weight_versions} == {step - 1}
        assert all(len(sample.forks) == 4 for sample in rollout.samples)


def test_two_nodes_compute_what_one_does(two_nodes: SlurmRun) -> None:
    """The recorded rollouts, replayed on this machine alone: every metric and every weight, bit for bit."""
    replay = ("rollout.source=replay", f"rollout.replay_dir={two_nodes.paths.records}")
    here = SlurmRun(inputs=two_nodes.inputs, name="one-node", nodes=1, more=(*RL, *TREES, *replay))
    finish_here(here)
    # How the weights travelled is another matter.
    assert [found for found in differences(here, two_nodes) if "sync/" not in found] == []


def test_an_asynchronous_run_on_nodes_of_two_kinds_outlives_an_engine(lab: SlurmLab, inputs: Path) -> None:
    """A heterogeneous job as `megarl slurm submit` writes it: the trainer on one kind, the engine on another."""
    run = SlurmRun(inputs=inputs, name="two-kinds", nodes=1, more=(*ONE_RANK, *ASYNC))
    config, *overrides = [a for a in run.arguments[len(MEGARL) + 1 :] if a != "--resume"]
    where = [f"--sbatch=--output={run.output}", "--sbatch=--nodelist=node1", "--engine-sbatch=--nodelist=node2"]
    sizes = ["--nodes=1", "--gpus-per-node=0", "--cpus-per-node=8"]
    sizes += ["--engine-nodes=1", "--engine-gpus-per-node=0", "--engine-cpus-per-node=4"]
    submitted = subprocess.check_output(
        [*MEGARL, "slurm", "submit", "--config", config, *sizes, "--time=10", "--signal-s=60", *where, *overrides],
        env=lab.environment | VENV,
        cwd=REPOSITORY,
        text=True,
    )
    job = int(submitted.split()[-1])
    mid_run(run, after=1)
    require_apart(lab)
    (engine,) = lab.actors("node2", "EngineActor")
    os.kill(engine, signal.SIGKILL)
    noticed(run, "engine 0 (node2) died")
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
    require_asynchronous(run)
    assert left_behind(lab) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_environments_on_a_node_of_their_own_outlive_a_worker(lab: SlurmLab, inputs: Path) -> None:
    """A heterogeneous job as `megarl slurm submit` writes it; it computes what a run does that has all on one node."""
    more = (*ONE_RANK, "data.val=[]", f"trainer.total_steps={STEPS}", "actor.optimizer.warmup_steps=0", *TREES)
    here = SlurmRun(inputs=inputs, name="environments-here", nodes=1, more=more)
    finish_here(here)
    run = SlurmRun(inputs=inputs, name="environments-apart", nodes=1, more=more)
    config, *overrides = [a for a in run.arguments[len(MEGARL) + 1 :] if a != "--resume"]
    where = [f"--sbatch=--output={run.output}", "--sbatch=--nodelist=node1", "--environment-sbatch=--nodelist=node2"]
    sizes = ["--nodes=1", "--gpus-per-node=0", "--cpus-per-node=8"]
    sizes += ["--environment-nodes=1", "--environment-cpus-per-node=4"]
    submitted = subprocess.check_output(
        [*MEGARL, "slurm", "submit", "--config", config, *sizes, "--time=10", "--signal-s=60", *where, *overrides],
        env=lab.environment | VENV | {NOTES: str(run.notes)},
        cwd=REPOSITORY,
        text=True,
    )
    job = int(submitted.split()[-1])
    mid_run(run, after=1)
    assert [len(lab.actors(node, "EnvironmentWorkerActor")) for node in lab.nodes] == [0, 2]
    os.kill(lab.actors("node2", "EnvironmentWorkerActor")[0], signal.SIGKILL)
    noticed(run, "died on node2; restart 1 of 10")
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
    assert "environment workers: 2 on node2" in run.log()
    assert differences(run, here) == []
    assert left_behind(lab) == []


@pytest.mark.long
def test_a_job_of_two_components_continues_as_a_whole_after_its_time_limit(lab: SlurmLab, inputs: Path) -> None:
    """USR1 to the batch script, as before the limit. The job is slurm/train_split.sbatch, with options for both."""
    run = SlurmRun(inputs=inputs, name="two-kinds-requeued", nodes=1, more=(*ONE_RANK, *ASYNC))
    other = [*job_options(1, run.output), "--nodelist=node2", "--cpus-per-task=4"]
    job = run.submit(lab, "--nodelist=node1", ":", *other, script="train_split")
    mid_run(run, after=2)
    lab.query("scancel", "--batch", "--signal=USR1", str(job))
    wait_until(lambda: "continuing after step" in run.log(), "the job's second life", timeout_s=JOB_S, seen=run.log)
    mid_run(run, after=run.last_step() + 1)
    require_apart(lab)
    ended = lab.wait(job, timeout_s=JOB_S)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), run.log()
    require_asynchronous(run)
    assert left_behind(lab) == []


def require_asynchronous(run: SlurmRun) -> None:
    """No prompt was lost or trained on twice, and samples were stale within the limit."""
    trained = [read_record(record_path(run.paths.records, step)) for step in range(1, ASYNC_STEPS + 1)]
    prompts = [uid for rollout in trained for uid in rollout.prompts]
    assert len(set(prompts)) == len(prompts) == ASYNC_STEPS
    samples = [(step, sample) for step, rollout in enumerate(trained, start=1) for sample in rollout.samples]
    lags = [step - 1 - int(segment.weight_versions.min()) for step, s in samples for segment in s.segments[1:]]
    assert 1 <= max(lags) <= 2


def require_apart(lab: SlurmLab) -> None:
    """The rank is on the node of the job's first component, and the engine on that of its second."""
    for name, counts in (("RankActor", [1, 0]), ("EngineActor", [0, 1])):
        assert [len(lab.actors(node, name)) for node in lab.nodes] == counts


def require_synced(run: SlurmRun) -> None:
    """Every step's samples come from weights on whose log-probs trainer and engines agree."""
    records = [record for record in run.records() if "actor/loss" in record.metrics]
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert 0 < record.metrics["mismatch/abs_mean"] <= 1e-5
        assert record.metrics["actor/grad_norm"] > 0
