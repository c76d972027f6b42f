"""A recorded rollout gives the same update in every layout and split, and the one that plain torch computes.

On-policy, GRPO's loss is about 0 whatever the weights, so `old_logprobs` are the trainer's with noise. Adam's ε is
large against the rounding of gradients: with a tiny one, weights whose gradient is noise would move by ±lr.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema import LayoutConfig
from tests.helpers.compare import assert_within
from tests.helpers.dense_trainer import DensePolicy, DenseStep, Objective
from tests.helpers.rank_pool import RankPool
from tests.helpers.replay_checks import (
    GRAD_NORM_RELATIVE,
    LOSS_PER_ADVANTAGE,
    WEIGHT,
    assert_same_logprobs,
    assert_same_steps,
    assert_same_weights,
)
from tests.helpers.replays import (
    ADAM,
    ALGORITHMS,
    FURTHER,
    LEARNING_RATES,
    OFF_POLICY,
    TEMPERATURE,
    TIED,
    Case,
    Replay,
    Run,
    alone,
    make_replay,
    one_batch,
    planned,
    row_by_row,
    run_replay,
)

GetPool = Callable[[int], RankPool]
GetCheckpoint = Callable[..., Path]


BASELINE = Case(layout=LayoutConfig(), plan=one_batch)
CASES = {
    "tp1 row by row": Case(layout=LayoutConfig(), plan=row_by_row),
    "tp1 planned, plain optimizer": Case(layout=LayoutConfig(), plan=planned(1), distributed=False),
    "tp2": Case(layout=LayoutConfig(tp=2), plan=planned(1)),
    "tp2 row by row": Case(layout=LayoutConfig(tp=2), plan=row_by_row),
    "tp2-sp": Case(layout=LayoutConfig(tp=2, sequence_parallel=True), plan=planned(1)),
    "tp2-sp row by row": Case(layout=LayoutConfig(tp=2, sequence_parallel=True), plan=row_by_row),
    "dp2": Case(layout=LayoutConfig(dp=2), plan=planned(2)),
    "dp2 plain optimizer": Case(layout=LayoutConfig(dp=2), plan=planned(2), distributed=False),
    "dp2 with a rank without rows": Case(layout=LayoutConfig(dp=2), plan=alone(2)),
    "pp2": Case(layout=LayoutConfig(pp=2), plan=planned(1)),
    "pp2 uneven": Case(layout=LayoutConfig(pp=2, first_stage_layers=3), plan=row_by_row),
    "tp2-sp pp2": Case(layout=LayoutConfig(tp=2, sequence_parallel=True, pp=2), plan=planned(1)),
    "pp2 vpp2": Case(layout=LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True), plan=planned(1, multiple=2)),
    "cp2": Case(layout=LayoutConfig(cp=2), plan=planned(1)),
    "tp2-sp cp2": Case(layout=LayoutConfig(tp=2, sequence_parallel=True, cp=2), plan=planned(1)),
    "cp2 dp2": Case(layout=LayoutConfig(cp=2, dp=2), plan=planned(2)),
    "cp2 dp2 with a rank without rows": Case(layout=LayoutConfig(cp=2, dp=2), plan=alone(2)),
    "pp2 dp2 plain optimizer": Case(layout=LayoutConfig(pp=2, dp=2), plan=planned(2), distributed=False),
    "pp2 dp2 with a rank without rows": Case(layout=LayoutConfig(pp=2, dp=2), plan=alone(2)),
    "tp2-sp, full recompute": Case(
        layout=LayoutConfig(tp=2, sequence_parallel=True), plan=planned(1), recompute="full"
    ),
    "tp1, selective recompute": Case(layout=LayoutConfig(), plan=planned(1), recompute="selective"),
    "tp2-sp dp2": Case(layout=LayoutConfig(tp=2, sequence_parallel=True, dp=2), plan=planned(2)),
    "tp2-sp dp2 with a rank without rows": Case(layout=LayoutConfig(tp=2, sequence_parallel=True, dp=2), plan=alone(2)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A replay, and its run at TP 1 in one micro-batch."""

    replay: Replay
    run: Run


@pytest.fixture(scope="module")
def baseline(
    rank_pool: GetPool, checkpoint: GetCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Baseline]:
    made: dict[str, Baseline] = {}

    def get(name: str) -> Baseline:
        if name not in made:
            directory = tmp_path_factory.mktemp("baseline")
            replay = make_replay(name, checkpoint(tied=TIED[name], num_layers=4), directory / "r.parquet", rank_pool(1))
            plan = BASELINE.plan(replay.rows)
            run = run_replay(replay, rank_pool(1), BASELINE.actor, plan, directory)
            made[name] = Baseline(replay=replay, run=run)
        return made[name]

    return get


# Every dimension, alone or with tensor parallelism, with one algorithm, and other algorithms where they differ: in sums
# over ranks and packs. The other pairs are long.
SHORT = {
    ("tp1 row by row", "token-mean"),
    ("tp1 planned, plain optimizer", "token-mean"),
    ("tp1, selective recompute", "token-mean"),
    ("tp2-sp", "token-mean+kl+entropy"),
    ("tp2-sp, full recompute", "token-mean"),
    ("tp2-sp pp2", "token-mean"),
    ("dp2", "seq-mean-token-mean+entropy"),
    ("dp2 with a rank without rows", "token-mean"),
    ("pp2", "gspo"),
    ("pp2 uneven", "token-mean"),
    ("pp2 vpp2", "token-mean"),
    ("cp2", "gspo"),
    ("tp2-sp", "vespo+m2po"),
    ("dp2", "vespo+m2po"),
    ("tp1 row by row", "ctpo+high entropy"),
    ("pp2", "ctpo+high entropy"),
    *((case, name) for case in ("tp2-sp", "pp2", "cp2") for name in ("centering", "centering exact")),
    ("tp1 row by row", "centering exact"),
    ("tp2-sp", "dppo exact"),
    *((case, "flowrl") for case in ("tp1 row by row", "tp2-sp", "pp2")),
    *((case, "echo") for case in ("tp1 row by row", "tp2", "tp2-sp", "pp2", "cp2")),
}
# These differ from the others in pure functions, which unit tests cover, and in quantities that rows carry.
RARE = ("gmpo", "sapo", "clip_cov", "kl_cov")

PAIRS = [
    pytest.param(case, algorithm, marks=() if (case, algorithm) in SHORT else pytest.mark.long)
    for case in CASES
    for algorithm in ALGORITHMS
    if algorithm not in FURTHER
]


@pytest.mark.parametrize("algorithm", FURTHER)
@pytest.mark.parametrize("case", ["tp1 row by row", "tp2", "tp2-sp", "pp2"])
def test_further_losses(
    rank_pool: GetPool, baseline: Callable[[str], Baseline], tmp_path: Path, case: str, algorithm: str
) -> None:
    test_layouts_and_splits(rank_pool, baseline, tmp_path, case, algorithm)
    # Bounds end gradients, and weights are not 1.
    metrics = baseline(algorithm).run.steps[0].metrics
    assert 0.01 < metrics.get("actor/pg_clipfrac", metrics.get("actor/pg_weight", 0.5)) < 0.99


@pytest.mark.parametrize(("case", "algorithm"), PAIRS)
def test_layouts_and_splits(
    rank_pool: GetPool, baseline: Callable[[str], Baseline], tmp_path: Path, case: str, algorithm: str
) -> None:
    expected = baseline(algorithm)
    replay, layout = expected.replay, CASES[case].layout
    plan = CASES[case].plan(replay.rows)
    assert len(plan) == layout.dp
    assert all(len(micro_batches) > 1 for micro_batches in plan)
    got = run_replay(replay, rank_pool(layout.world_size), CASES[case].actor, plan, tmp_path)
    assert_same_steps(got, expected.run, mean_abs_advantage=replay.mean_abs_advantage)


# What a filter leaves may be too few rows for the ranks: by their number, who has which.
FEW_ROWS: dict[int, list[list[list[int]]]] = {3: [[[0], [2]], [[1], []]], 1: [[[]], [[0]]]}


@pytest.mark.parametrize("num_rows", list(FEW_ROWS))
def test_too_few_rows_for_the_ranks(
    rank_pool: GetPool, baseline: Callable[[str], Baseline], tmp_path: Path, num_rows: int
) -> None:
    """Gradients come from the other rank alone, and metrics count every row once."""
    replay = baseline("token-mean+kl+entropy").replay
    replay = replace(replay, rows=replay.rows[:num_rows])
    expected = run_replay(replay, rank_pool(1), BASELINE.actor, one_batch(replay.rows), tmp_path / "one")
    got = run_replay(replay, rank_pool(2), CASES["dp2"].actor, FEW_ROWS[num_rows], tmp_path / "two")
    assert expected.steps[0].metrics["actor/grad_norm"] > 0
    assert_same_steps(got, expected, mean_abs_advantage=replay.mean_abs_advantage)


def dense_steps(replay: Replay) -> list[DenseStep]:
    objective = Objective(
        per_row=replay.cfg.aggregation == "seq-mean-token-mean",
        entropy_coef=replay.cfg.entropy_coef,
        kl_coef=replay.cfg.kl.coef if replay.cfg.kl.where == "loss" else 0.0,
        temperature=TEMPERATURE,
        policy_loss=replay.cfg.policy_loss.name,
        echo_coef=replay.cfg.echo_coef,
    )
    trainer = DensePolicy(replay.path, objective, ADAM)
    return [trainer.step(replay.rows, lr) for lr in LEARNING_RATES]


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=pytest.mark.long if name in RARE else ())
        for name in ALGORITHMS
        if name not in OFF_POLICY
    ],
)
def test_one_rank_equals_plain_torch(baseline: Callable[[str], Baseline], algorithm: str) -> None:
    replay, run = baseline(algorithm).replay, baseline(algorithm).run
    expected = dense_steps(replay)
    for got, dense in zip(run.steps, expected, strict=True):
        assert_within(
            "loss", got.metrics["actor/loss"], dense.loss, atol=LOSS_PER_ADVANTAGE * replay.mean_abs_advantage
        )
        norm_atol = GRAD_NORM_RELATIVE * dense.grad_norm
        assert_within("grad norm", got.metrics["actor/grad_norm"], dense.grad_norm, atol=norm_atol)
        assert_same_logprobs("actor", got.logprobs, dense.before)
        assert_same_weights(got.weights, {name: dense.weights[name] for name in got.weights})
        # Clipping was active, the loss is not about 0, and the tolerances are small against what a step moves.
        assert dense.grad_norm > 1.2 * ADAM.clip_grad_norm
        assert abs(dense.loss) > 100 * LOSS_PER_ADVANTAGE * replay.mean_abs_advantage
    moved = expected[1].weights["model.norm.weight"] - expected[0].weights["model.norm.weight"]
    assert moved.abs().mean() > 30 * WEIGHT


def test_a_small_mistake_would_be_seen(rank_pool: GetPool, baseline: Callable[[str], Baseline], tmp_path: Path) -> None:
    """Advantages of the longest of twelve rows off by 2 %: loss, gradient norm and weights leave their tolerances."""
    replay, expected = baseline("token-mean").replay, baseline("token-mean").run.steps[0]
    longest = max(replay.rows, key=lambda row: row.num_loss_tokens)
    wrong = longest.with_quantities(advantages=longest.quantities["advantages"] * np.float32(1.02))
    changed = replace(replay, rows=[wrong if row is longest else row for row in replay.rows])
    got = run_replay(changed, rank_pool(1), BASELINE.actor, one_batch(replay.rows), tmp_path).steps[0]
    loss_error, norm_error = (abs(got.metrics[n] - expected.metrics[n]) for n in ("actor/loss", "actor/grad_norm"))
    assert loss_error > LOSS_PER_ADVANTAGE * replay.mean_abs_advantage
    assert norm_error > GRAD_NORM_RELATIVE * expected.metrics["actor/grad_norm"]
    with pytest.raises(AssertionError, match="weights"):
        assert_same_weights(got.weights, expected.weights)
