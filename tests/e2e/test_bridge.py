"""Engines that get only their slices answer as new ones on the exported weights, and get no byte too many."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cluster.roles import engine_spec
from megarl.types import FloatArray
from tests.e2e import bridge_run, engines
from tests.e2e.support import largest_difference, mean_difference, small_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.expert_checkpoint import make_moe
from tests.helpers.rank_pool import RankPool

# Minutes beside what the default set has of it.
pytestmark = pytest.mark.long

# float32 rounding of two implementations; wrong or stale weights are off by 1e-2 and more.
NATS = 1e-5
LAYOUTS = {
    "TP2": "actor.layout={tp: 2, sequence_parallel: true}",
    # Two ranks share a key/value head.
    "TP4": "actor.layout={tp: 4, sequence_parallel: true}",
    "PP2": "actor.layout={tp: 1, pp: 2, sequence_parallel: false}",
    "TP2xPP2": "actor.layout={tp: 2, pp: 2, sequence_parallel: true}",
    "EP2": "actor.layout={tp: 1, dp: 2, ep: 2, sequence_parallel: false}",
    "TP2xEP2": "actor.layout={tp: 2, ep: 2, sequence_parallel: true}",
}
MODELS = {
    "tied": lambda path: make_checkpoint(path, tied=True),
    "untied": lambda path: make_checkpoint(path, tied=False),
    # vLLM's CPU kernels pad a worker's part of an expert to a multiple of 32, and cannot reload what is padded.
    "experts": lambda path: make_moe(path, seed=0, moe_intermediate_size=64),
}


DENSE = [(model, layout) for model in ("tied", "untied") for layout in ("TP2", "PP2", "TP2xPP2")]
DENSE.append(("untied", "TP4"))
EXPERTS = [("experts", layout) for layout in ("TP2", "PP2", "TP2xPP2", "EP2", "TP2xEP2")]


def run_and_export(model: str, settings: list[str], tmp_path: Path) -> tuple[bridge_run.Report, Path]:
    """What engines and trainer said, and the weights that they ended with."""
    path, export = MODELS[model](tmp_path / "model"), tmp_path / "export"
    with RankPool(1, timeout_s=300.0) as pool:
        return pool.run(bridge_run.run, str(path), settings, str(export))[0], export


def fresh_answers(engine_process: RankPool, export: Path, *settings: str) -> list[FloatArray]:
    """Those of a new engine."""
    spec = engine_spec(small_config(export, "rollout.engine.tp=1", *settings))
    return engine_process.run(engines.view, spec, bridge_run.sequences())[0].given


@pytest.mark.parametrize("engine_tp", [1, 2], ids=["to TP1", "to TP2"])
@pytest.mark.parametrize(("model", "layout"), [*DENSE, *EXPERTS])
def test_engines_answer_as_new_ones(
    model: str, layout: str, engine_tp: int, engine_process: RankPool, tmp_path: Path
) -> None:
    report, export = run_and_export(model, [LAYOUTS[layout], f"rollout.engine.tp={engine_tp}"], tmp_path)
    assert largest_difference(report.engine[-1], fresh_answers(engine_process, export)) <= NATS
    for engine, trainer in zip(report.engine, report.trainer, strict=True):
        assert largest_difference(engine, trainer) <= NATS
    assert mean_difference(report.engine[0], report.engine[-1]) > 1e-3
    assert report.planned == report.minimum
    assert report.measured == [sum(report.minimum)] * (1 + bridge_run.ROUNDS)


def test_engines_after_differences_answer_as_new_ones(engine_process: RankPool, tmp_path: Path) -> None:
    """Bit for bit: in bfloat16 a small step changes few elements, and all that it does not reach stay."""
    settings = [LAYOUTS["TP2"], "rollout.engine.tp=1", "sync.delta=true"]
    bfloat16 = ("model.dtype=bfloat16", "actor.optimizer.lr=5e-6")
    report, export = run_and_export("tied", [*settings, *bfloat16], tmp_path)
    assert largest_difference(report.engine[-1], fresh_answers(engine_process, export, *bfloat16)) == 0
    assert largest_difference(report.engine[0], report.engine[-1]) > 0
    first, *others = report.measured
    assert first == sum(report.minimum)
    assert all(0 < size < first / 2 for size in others)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_engines_after_a_cast_answer_as_new_ones_on_cast_weights(
    dtype: str, engine_process: RankPool, tmp_path: Path
) -> None:
    settings = [LAYOUTS["TP2"], "rollout.engine.tp=2", f"sync.dtype={dtype}"]
    report, export = run_and_export("untied", settings, tmp_path)
    tensors = load_file(export / "model.safetensors")
    scaled = [name for name in tensors if name.endswith("_proj.weight")] if dtype == "float8_e4m3" else []
    for name in scaled:
        # Of the powers of two that the cast may have as scale, the smallest.
        scale = next(s for s in (2.0**k for k in range(-40, 40)) if tensors[name].abs().max() <= 448 * s)
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn).float() * scale
    if dtype == "bfloat16":
        tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    save_file(tensors, export / "model.safetensors", metadata={"format": "pt"})
    assert largest_difference(report.engine[-1], fresh_answers(engine_process, export)) <= NATS
    assert mean_difference(report.engine[-1], report.trainer[-1]) > 1e-4
    # A scale of four bytes for each of two workers.
    assert report.measured == [sum(report.minimum) + 2 * 4 * len(scaled)] * (1 + bridge_run.ROUNDS)


def test_an_engine_that_dies_while_it_receives_ends_the_run(tmp_path: Path) -> None:
    path = MODELS["tied"](tmp_path / "model")
    with RankPool(1, timeout_s=120.0) as pool:
        message, left = pool.run(bridge_run.run_killed, str(path))[0]
    assert message == "WorkerError: syncing weights: engine 0 died; see RUN/logs"
    assert left == []
