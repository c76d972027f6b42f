"""Two optimizer steps of a model with experts on a recorded rollout are the same in every layout and split."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.schema import LayoutConfig, MoeConfig
from tests.helpers.hf_models import make_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.replay_checks import WEIGHT, assert_same_steps
from tests.helpers.replays import Case, Replay, Run, alone, make_replay, one_batch, planned, row_by_row, run_replay

# Name → its keys besides four layers; in both one layer has no experts.
MODELS: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": [2]}, "deepseek_v3": {}}
# Balance counts in the gradients as much as the policy.
MOE = MoeConfig(aux_loss_coef=0.02)
TP2 = {"tp": 2, "sequence_parallel": True}
CASES = {
    "tp1 row by row": Case(layout=LayoutConfig(), plan=row_by_row, moe=MOE),
    "tp1, full recompute, plain optimizer": Case(
        layout=LayoutConfig(), plan=planned(1), distributed=False, recompute="full", moe=MOE
    ),
    "ep2": Case(layout=LayoutConfig(dp=2, ep=2), plan=planned(2), moe=MOE),
    "ep2 plain optimizer, full recompute": Case(
        layout=LayoutConfig(dp=2, ep=2), plan=planned(2), distributed=False, recompute="full", moe=MOE
    ),
    "ep2 with a rank without rows": Case(layout=LayoutConfig(dp=2, ep=2), plan=alone(2), moe=MOE),
    "dp2": Case(layout=LayoutConfig(dp=2), plan=planned(2), moe=MOE),
    "tp2-sp ep2": Case(layout=LayoutConfig(**TP2, ep=2), plan=row_by_row, moe=MOE),
    "tp2-sp": Case(layout=LayoutConfig(**TP2), plan=planned(1), moe=MOE),
    "tp2-sp etp2": Case(layout=LayoutConfig(**TP2, etp=2), plan=planned(1), moe=MOE),
    "cp2 ep2": Case(layout=LayoutConfig(cp=2, ep=2), plan=planned(1), moe=MOE),
    "pp2": Case(layout=LayoutConfig(pp=2), plan=planned(1), moe=MOE),
    "pp2 vpp2": Case(layout=LayoutConfig(pp=2, virtual_pp=2, overlap_p2p=True), plan=planned(1, multiple=2), moe=MOE),
    "tp2-sp dp2 ep2": Case(layout=LayoutConfig(**TP2, dp=2, ep=2), plan=planned(2), moe=MOE),
    "tp2-sp dp2 ep2 etp2": Case(layout=LayoutConfig(**TP2, dp=2, ep=2, etp=2), plan=planned(2), moe=MOE),
    "pp2 dp2 ep2": Case(layout=LayoutConfig(pp=2, dp=2, ep=2), plan=planned(2), moe=MOE),
}

GetPool = Callable[[int], RankPool]

# Minutes of layouts; test_moe_training.py has experts trained in the default set.
pytestmark = pytest.mark.long


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A replay, and its run on one rank in one micro-batch."""

    replay: Replay
    run: Run


@pytest.fixture(scope="module")
def baseline(rank_pool: GetPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Baseline]:
    @functools.cache
    def get(model: str) -> Baseline:
        directory = tmp_path_factory.mktemp(model)
        path = make_model(directory / "model", model, tied=False, num_hidden_layers=4, **MODELS[model])
        replay = make_replay("token-mean", path, directory / "r.parquet", rank_pool(1))
        case = Case(layout=LayoutConfig(), plan=one_batch, moe=MOE)
        run = run_replay(replay, rank_pool(1), case.actor, one_batch(replay.rows), directory / "run")
        return Baseline(replay=replay, run=run)

    return get


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("model", list(MODELS))
def test_layouts_and_splits(
    rank_pool: GetPool, baseline: Callable[[str], Baseline], tmp_path: Path, model: str, name: str
) -> None:
    case, expected = CASES[name], baseline(model)
    replay = expected.replay
    got = run_replay(replay, rank_pool(case.layout.world_size), case.actor, case.plan(replay.rows), tmp_path)
    assert {"moe/aux_loss", "moe/load_max_over_mean"} <= got.steps[0].metrics.keys()
    assert_same_steps(got, expected.run, mean_abs_advantage=replay.mean_abs_advantage)


@pytest.mark.parametrize("layout", [LayoutConfig(), LayoutConfig(**TP2, ep=2)], ids=["tp1", "tp2-sp ep2"])
def test_frozen_routers_keep_their_weights(
    rank_pool: GetPool, baseline: Callable[[str], Baseline], tmp_path: Path, layout: LayoutConfig
) -> None:
    """And everything else moves as it does on one rank; without freezing they would move too."""
    expected_run, replay = baseline("qwen3_moe").run, baseline("qwen3_moe").replay
    case = Case(layout=layout, plan=planned(1), moe=replace(MOE, freeze_router=True))
    got = run_replay(replay, rank_pool(layout.world_size), case.actor, case.plan(replay.rows), tmp_path)
    before = load_file(replay.path / "model.safetensors")
    after, free = got.steps[-1].weights, expected_run.steps[-1].weights
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    for name in before:
        if name in routers:
            assert torch.equal(after[name], before[name])
            assert (free[name] - before[name]).abs().max() > 30 * WEIGHT
        elif not name.endswith("_norm.weight"):
            assert (after[name] - before[name]).abs().max() > 30 * WEIGHT, name
    first, expected = got.steps[0].metrics, expected_run.steps[0].metrics
    assert first["actor/loss"] == pytest.approx(expected["actor/loss"], abs=1e-5)
    assert first["actor/grad_norm"] < expected["actor/grad_norm"]
