"""A run whose engine dies ends as if nothing had happened."""

from pathlib import Path

import pytest

from megarl.data.tasks.generate import TaskFiles
from tests.e2e import restart_run
from tests.e2e.support import SMALL
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.rank_pool import RankPool

SETTINGS = (
    *SMALL,
    "run.deterministic=true",
    "data.val=[]",
    "rollout.num_samples=4",
    "trainer.prompts_per_step=4",
    f"trainer.total_steps={restart_run.NUM_STEPS}",
    # Random answers earn nothing; the bonus is what moves the weights.
    "algo.entropy_coef=0.1",
    "actor.optimizer.lr=0.003",
    "sync.verify=true",
)
RESTARTS = "rollout/engine_restarts"
TWO_WORKERS = "rollout.engine.tp=2"
BRIDGE = "sync.transport=bridge"
COLLECTIVE = ("sync.transport=collective", "placement.mode=split")


def long(*values: object, name: str) -> object:
    return pytest.param(*values, id=name, marks=pytest.mark.long)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("moment", "victim", "settings"),
    [
        pytest.param("generating", "engine 0", (), id="generating"),
        long("idle", "engine 0", (), name="idle"),
        long("syncing", "engine 0", (), name="syncing"),
        long("generating", "engine 0", ("rollout.engine.num_engines=2",), name="one of two"),
        long("generating", "engine 0 worker 0", (TWO_WORKERS,), name="worker generating"),
        long("idle", "engine 0 worker 0", (TWO_WORKERS,), name="worker idle"),
        long("generating", "engine 0", ("placement.offload=true",), name="offload"),
        long("generating", "engine 0", (BRIDGE, "sync.delta=true"), name="bridge generating"),
        long("syncing", "engine 0", (BRIDGE, TWO_WORKERS, "sync.delta=true"), name="bridge syncing"),
        long("generating", "engine 0", COLLECTIVE, name="collective generating"),
        long("syncing", "engine 0", COLLECTIVE, name="collective syncing"),
    ],
)
def test_a_run_with_a_restart_equals_an_undisturbed_one(
    moment: str, victim: str, settings: tuple[str, ...], sums: TaskFiles, tmp_path: Path
) -> None:
    """Metrics but for the count of restarts, and the weights, bit for bit."""
    model = make_checkpoint(tmp_path / "model", tied=True)
    inputs = (f"run.dir={tmp_path}", f"model.path={model}", f"data.train=[{sums.train}]")
    with RankPool(1, timeout_s=500.0) as pool:
        undisturbed, disturbed = pool.run(restart_run.run, [*SETTINGS, *inputs, *settings], moment, victim)[0]
    assert [metrics.pop(RESTARTS) for metrics in undisturbed.metrics] == [0, 0, 0]
    assert sum(metrics.pop(RESTARTS) for metrics in disturbed.metrics) == 1
    assert len({metrics["actor/entropy"] for metrics in undisturbed.metrics}) == restart_run.NUM_STEPS
    # How much travels depends on what the new engine lacks.
    for metrics in (*undisturbed.metrics, *disturbed.metrics) if "sync.delta=true" in settings else ():
        metrics.pop("sync/wire_bytes")
    assert disturbed.metrics == undisturbed.metrics
    assert disturbed.weights == undisturbed.weights
    assert undisturbed.num_again == []
    # Some were finished when it died, and not all.
    assert [0 < count < 16 for count in disturbed.num_again] == [True] * (moment == "generating")
