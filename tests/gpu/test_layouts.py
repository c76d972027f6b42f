"""On CUDA too a recorded rollout gives the same update in every layout that the devices allow, and plain torch's.

In float32, on megarl's own layers: Transformer Engine's packed attention takes 16-bit numbers only.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.schema import LayoutConfig
from tests.helpers.cuda import needs_devices
from tests.helpers.dense_trainer import DensePolicy, Objective
from tests.helpers.rank_pool import RankPool
from tests.helpers.replay_checks import assert_same_logprobs, assert_same_steps, assert_same_weights
from tests.helpers.replays import (
    ADAM,
    LEARNING_RATES,
    TEMPERATURE,
    Case,
    Run,
    make_replay,
    one_batch,
    planned,
    run_replay,
)

pytestmark = [pytest.mark.gpu, needs_devices(1)]

GetPool = Callable[[int], RankPool]
ALGORITHM = "token-mean"
BASELINE = Case(layout=LayoutConfig(), plan=one_batch)
CASES = {
    "tp1 in micro-batches": Case(layout=LayoutConfig(), plan=planned(1)),
    "tp1, full recompute": Case(layout=LayoutConfig(), plan=planned(1), recompute="full"),
    "tp2-sp": Case(layout=LayoutConfig(tp=2, sequence_parallel=True), plan=planned(1)),
    "dp2": Case(layout=LayoutConfig(dp=2), plan=planned(2)),
    "pp2": Case(layout=LayoutConfig(pp=2), plan=planned(1)),
    "cp2": Case(layout=LayoutConfig(cp=2), plan=planned(1)),
    "tp2-sp pp2": Case(layout=LayoutConfig(tp=2, sequence_parallel=True, pp=2), plan=planned(1)),
    "tp2-sp cp2": Case(layout=LayoutConfig(tp=2, sequence_parallel=True, cp=2), plan=planned(1)),
}


def run(case: Case, local_pool: GetPool, path: Path, directory: Path) -> tuple[Run, float]:
    """Two steps under a case, and the mean absolute advantage of their rows."""
    replay = make_replay(ALGORITHM, path, directory / "r.parquet", local_pool(1))
    steps = run_replay(
        replay, local_pool(case.layout.world_size), case.actor, case.plan(replay.rows), directory / "weights"
    )
    return steps, replay.mean_abs_advantage


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=needs_devices(case.layout.world_size), id=name) for name, case in CASES.items()]
)
def test_layouts_agree(local_pool: GetPool, checkpoint: Callable[..., Path], tmp_path: Path, case: Case) -> None:
    (tmp_path / "baseline").mkdir()
    (tmp_path / "case").mkdir()
    expected, mean_abs_advantage = run(BASELINE, local_pool, checkpoint(), tmp_path / "baseline")
    got, _ = run(case, local_pool, checkpoint(), tmp_path / "case")
    assert_same_steps(got, expected, mean_abs_advantage=mean_abs_advantage)


def test_one_device_equals_plain_torch_on_the_host(
    local_pool: GetPool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    replay = make_replay(ALGORITHM, checkpoint(), tmp_path / "r.parquet", local_pool(1))
    got = run_replay(replay, local_pool(1), BASELINE.actor, one_batch(replay.rows), tmp_path / "weights")
    objective = Objective(per_row=False, entropy_coef=0.0, kl_coef=0.0, temperature=TEMPERATURE)
    dense = DensePolicy(replay.path, objective, ADAM)
    for step, lr in zip(got.steps, LEARNING_RATES, strict=True):
        expected = dense.step(replay.rows, lr)
        assert_same_logprobs("actor", step.logprobs, expected.before)
        assert_same_weights(step.weights, {name: expected.weights[name] for name in step.weights})
