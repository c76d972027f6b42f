"""Reinforcement learning over two nodes: the same results as on one, and what happens when an engine dies."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from megarl.rollout.replay import read_record, record_path
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import JOB_S, REPOSITORY, VENV, SlurmRun, finish_here, left_behind, mid_run, noticed
from tools.bench.kill_resume import MEGARL, differences

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
RL = (*LAYOUT, "data.val=[]", f"trainer.total_steps={STEPS}", "actor.optimizer.warmup_steps=0")


@pytest.fixture(scope="module")
def two_nodes(lab: SlurmLab, inputs: Path) -> SlurmRun:
    """The uninterrupted run."""
    run = SlurmRun(inputs=inputs, name="two-nodes", more=(*RL, *ENGINES))
    job = run.submit(lab)
    mid_run(run, after=1)
    for node in lab.nodes:
        assert len(lab.processes(node, name="ray::RankActor")) == 2
        assert len(lab.processes(node, name="ray::EngineActor")) == 1
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


def test_two_nodes_compute_what_one_does(two_nodes: SlurmRun) -> None:
    """The recorded rollouts, replayed on this machine alone: every metric and every weight, bit for bit."""
    replay = ("rollout.source=replay", f"rollout.replay_dir={two_nodes.paths.records}")
    here = SlurmRun(inputs=two_nodes.inputs, name="one-node", nodes=1, more=(*RL, *replay))
    finish_here(here)
    # How the weights travelled is another matter.
    assert [found for found in differences(here, two_nodes) if "sync/" not in found] == []


def test_a_split_run_on_nodes_of_two_kinds_outlives_an_engine(lab: SlurmLab, inputs: Path) -> None:
    """A heterogeneous job as `megarl slurm submit` writes it: the trainer on one kind, the engine on another."""
    split = ("placement.mode=split", "sync.verify=true", "rollout.engine.num_engines=1")
    single = ("actor.layout.tp=1", "actor.layout.sequence_parallel=false", "actor.layout.dp=1")
    run = SlurmRun(inputs=inputs, name="two-kinds", nodes=1, more=(*RL, *single, *split))
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
    assert [len(lab.processes(node, name="ray::RankActor")) for node in lab.nodes] == [1, 0]
    (engine,) = lab.processes("node2", name="ray::EngineActor")
    os.kill(engine, signal.SIGKILL)
    noticed(run, "engine 0 (node2) died")
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
    require_synced(run)
    assert left_behind(lab) == []


def require_synced(run: SlurmRun) -> None:
    """Every step's samples come from weights on whose log-probs trainer and engines agree."""
    records = [record for record in run.records() if "actor/loss" in record.metrics]
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert 0 < record.metrics["mismatch/abs_mean"] <= 1e-5
        assert record.metrics["actor/grad_norm"] > 0
