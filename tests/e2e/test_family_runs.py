"""Whole runs of every family: what engines sample has the trainer's log-probs, step after step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.record.metrics import read_metrics
from megarl.weights.families import read_model_spec
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e.support import TP2
from tests.e2e.test_family_engines import MODELS, make_engine_model
from tests.e2e.test_moe_run import TP2_EP2, Runs

# The default case has a vision tower, which engines leave out.
DEFAULT = "gemma3+tower"
# Of the token where both differ most: float32 rounding. Wrong or stale weights are off by 1e-2 and more.
NATS = 1e-4


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == DEFAULT else pytest.mark.long) for n in MODELS])
def test_engines_follow_the_trainer(
    name: str, sums: TaskFiles, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two tensor-parallel ranks, which share experts; checksums of every sync are compared."""
    model = make_engine_model(tmp_path / "model", name)
    runs = Runs(directory=tmp_path, inputs=(f"model.path={model}", f"data.train=[{sums.train}]"))
    settings = [TP2_EP2] if read_model_spec(model).dims.experts else [TP2[0], "actor.moe.aux_loss_coef=0"]
    runs.run("run", *settings)
    records = read_metrics(runs.paths("run").metrics)
    assert [record.step for record in records] == [1, 2, 3]
    worst = [record.metrics["mismatch/abs_max"] for record in records]
    record_property("nats", worst)
    assert 0 < max(worst) <= NATS, worst
    assert min(record.metrics["actor/grad_norm"] for record in records) > 0
