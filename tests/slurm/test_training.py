"""Reinforcement learning over two nodes: the same results as on one, and what happens when an engine dies."""

import os
import re
import signal
from pathlib import Path

import pytest

from megarl.metrics import read_metrics
from megarl.rollout.replay import read_record, record_path
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import JOB_S, NOTICED_S, SlurmRun, finish_here, left_behind, mid_run, wait_until
from tools.bench.kill_resume import differences

pytestmark = pytest.mark.timeout(400)
STEPS = 3
# Tensor parallelism within a node, data parallelism across, and an engine beside the ranks of each.
LAYOUT = ("actor.layout.tp=2", "actor.layout.sequence_parallel=true", "actor.layout.dp=2")
ENGINES = (
    "placement.mode=split",
    "placement.engines.num_nodes=2",
    "rollout.engine.num_engines=2",
    # A process group of all ranks and engines: every tensor crosses the network.
    "sync.transport=collective",
    "sync.verify=true",
    "rollout.record=true",
)
RL = (*LAYOUT, "data.val=[]", f"trainer.total_steps={STEPS}")


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
    """Each step's samples come from the last step's weights, and trainer and engines agree on their log-probs."""
    records = [record for record in read_metrics(two_nodes.paths.metrics) if "actor/loss" in record.metrics]
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert 0 < record.metrics["mismatch/abs_mean"] <= 1e-5
        assert record.metrics["actor/grad_norm"] > 0
        rollout = read_record(record_path(two_nodes.paths.records, record.step))
        versions = {int(v) for s in rollout.samples for v in s.segments[-1].weight_versions}
        assert versions == {record.step - 1}


def test_two_nodes_compute_what_one_does(two_nodes: SlurmRun) -> None:
    """The recorded rollouts, replayed on this machine alone: every metric and every weight, bit for bit."""
    replay = ("rollout.source=replay", f"rollout.replay_dir={two_nodes.paths.records}")
    here = SlurmRun(inputs=two_nodes.inputs, name="one-node", nodes=1, more=(*RL, *replay))
    finish_here(here)
    assert differences(here, two_nodes) == []


def test_a_dead_engine_is_named_and_the_run_goes_on(lab: SlurmLab, two_nodes: SlurmRun) -> None:
    run = SlurmRun(inputs=two_nodes.inputs, name="killed-engine", more=(*RL, *ENGINES))
    job = run.submit(lab)
    mid_run(run, after=1)
    os.kill(lab.processes("node2", name="ray::EngineActor")[0], signal.SIGKILL)
    named = r"engine 1 \(node2\) died"
    wait_until(lambda: re.search(named, run.log()) is not None, named, timeout_s=NOTICED_S)
    assert lab.wait(job, timeout_s=JOB_S)["JobState"] == "COMPLETED", run.log()
    assert differences(run, two_nodes) == []
    assert left_behind(lab) == []
