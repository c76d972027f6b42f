"""A run whose engine dies ends as if nothing had happened."""

from pathlib import Path

import pytest

from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e import restart_run
from tests.e2e.restart_run import Death
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
TWO_ENGINES, TWO_WORKERS = "rollout.engine.num_engines=2", "rollout.engine.tp=2"
DELTA = "sync.delta=true"
# No setting of megarl's: see `restart_run.run`.
APART = "apart"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("settings", "deaths"),
    [
        pytest.param((), [Death("generating", "engine 0")], id="generating"),
        pytest.param(
            (TWO_ENGINES,),
            [Death("idle", "engine 0"), Death("syncing", "engine 1"), Death("generating", "engine 1")],
            id="two engines",
        ),
        pytest.param(
            (TWO_WORKERS,),
            [
                Death("idle", "engine 0 worker 0"),
                Death("syncing", "engine 0 worker 1"),
                Death("generating", "engine 0 worker 0"),
            ],
            id="workers",
        ),
        pytest.param(
            ("placement.offload=true",), [Death("generating", "engine 0"), Death("idle", "engine 0")], id="offload"
        ),
        pytest.param(
            (TWO_WORKERS, DELTA), [Death("syncing", "engine 0"), Death("generating", "engine 0")], id="differences"
        ),
        pytest.param((TWO_ENGINES, APART), [Death("syncing", "engine 0")], id="between hosts"),
        pytest.param(
            ("placement.mode=split", TWO_ENGINES),
            [Death("syncing", "engine 0"), Death("generating", "engine 0")],
            id="split",
        ),
        pytest.param(
            ("actor.lora={rank: 4, sync: adapter}", TWO_ENGINES),
            [Death("syncing", "engine 0"), Death("generating", "engine 1")],
            id="adapters",
        ),
    ],
)
def test_a_run_with_a_restart_equals_an_undisturbed_one(
    settings: tuple[str, ...], deaths: list[Death], sums: TaskFiles, tmp_path: Path
) -> None:
    """Metrics but for the count of restarts, and the weights, bit for bit."""
    model = make_checkpoint(tmp_path / "model", tied=True)
    inputs = (f"run.dir={tmp_path}", f"model.path={model}", f"data.train=[{sums.train}]")
    given = [*SETTINGS, *inputs, *(setting for setting in settings if setting != APART)]
    with RankPool(1, timeout_s=800.0) as pool:
        undisturbed, *disturbed = pool.run(restart_run.run, given, deaths, APART in settings)[0]
    # A new engine gets everything, not differences.
    left_out = {RESTARTS, "sync/wire_bytes"} if DELTA in settings else {RESTARTS}
    expected = without(undisturbed.metrics, left_out)
    assert [metrics[RESTARTS] for metrics in undisturbed.metrics] == [0, 0, 0]
    assert undisturbed.num_again == []
    # There is something that a restart could change.
    assert len({metrics["actor/entropy"] for metrics in expected}) == restart_run.NUM_STEPS
    for death, seen in zip(deaths, disturbed, strict=True):
        assert sum(metrics[RESTARTS] for metrics in seen.metrics) == 1
        # Some were finished when it died, and not all.
        assert [0 < count < 16 for count in seen.num_again] == [True] * (death.moment == "generating")
        assert without(seen.metrics, left_out) == expected
        assert seen.weights == undisturbed.weights


def without(metrics: list[dict[str, float]], names: set[str]) -> list[dict[str, float]]:
    return [{name: value for name, value in each.items() if name not in names} for each in metrics]
