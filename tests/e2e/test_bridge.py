"""Engines that get only their slices answer as new ones on the exported weights, and get no byte too many."""

from pathlib import Path

import pytest

from megarl.rollout.engine import engine_spec
from tests.e2e import bridge_run, engines
from tests.e2e.support import largest_difference, mean_difference, small_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.expert_checkpoint import make_moe
from tests.helpers.rank_pool import RankPool

# Minutes beside what the default set has of it.
pytestmark = pytest.mark.long

# float32 rounding of two implementations; wrong or stale weights are off by 1e-2 and more.
NATS = 1e-5
TP2 = "actor.layout={tp: 2, sequence_parallel: true}"
PP2 = "actor.layout={tp: 1, pp: 2, sequence_parallel: false}"
TP2_PP2 = "actor.layout={tp: 2, pp: 2, sequence_parallel: true}"
EP2 = "actor.layout={tp: 1, dp: 2, ep: 2, sequence_parallel: false}"
MODELS = {
    "tied": lambda path: make_checkpoint(path, tied=True),
    "untied": lambda path: make_checkpoint(path, tied=False),
    # vLLM's CPU kernels pad a worker's part of an expert to a multiple of 32, and cannot reload what is padded.
    "experts": lambda path: make_moe(path, seed=0, moe_intermediate_size=64),
}


@pytest.mark.parametrize(
    ("model", "layout", "engine_tp"),
    [
        pytest.param("tied", TP2, 2, id="TP2 to TP2, tied"),
        pytest.param("untied", PP2, 2, id="PP2 to TP2, untied", marks=pytest.mark.long),
        pytest.param("tied", TP2_PP2, 2, id="TP2xPP2 to TP2, tied", marks=pytest.mark.long),
        pytest.param("untied", TP2, 1, id="TP2 to TP1, untied", marks=pytest.mark.long),
        pytest.param("tied", PP2, 1, id="PP2 to TP1, tied", marks=pytest.mark.long),
        pytest.param("untied", TP2_PP2, 1, id="TP2xPP2 to TP1, untied", marks=pytest.mark.long),
        pytest.param("experts", EP2, 2, id="EP2 to TP2, experts", marks=pytest.mark.long),
    ],
)
def test_engines_answer_as_new_ones(
    model: str, layout: str, engine_tp: int, engine_process: RankPool, tmp_path: Path
) -> None:
    path, export = MODELS[model](tmp_path / "model"), tmp_path / "export"
    settings = [layout, f"rollout.engine.tp={engine_tp}"]
    with RankPool(1, timeout_s=300.0) as pool:
        report = pool.run(bridge_run.run, str(path), settings, str(export))[0]
    spec = engine_spec(small_config(export, "rollout.engine.tp=1"))
    fresh = engine_process.run(engines.view, spec, bridge_run.sequences())[0].given
    assert largest_difference(report.engine[-1], fresh) <= NATS
    for engine, trainer in zip(report.engine, report.trainer, strict=True):
        assert largest_difference(engine, trainer) <= NATS
    assert mean_difference(report.engine[0], report.engine[-1]) > 1e-3
    assert report.planned == report.minimum
    assert report.measured == [sum(report.minimum)] * (1 + bridge_run.ROUNDS)
