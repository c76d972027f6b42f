"""Training on preference pairs by command: trained, continued under another layout, and exported."""

from pathlib import Path

import pytest

from megarl.record.metrics import RunPaths, read_metrics
from megarl.rewards import score
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import PreferenceConfig, generate_preferences
from tests.e2e.cli_run import run_to_end
from tests.e2e.support import REPOSITORY, SMALL
from tests.helpers.checkpoints import load_hf, make_checkpoint

RUN_FILE = REPOSITORY / "configs" / "run" / "sums-dpo.yaml"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_from_pairs_to_a_policy(tmp_path: Path, objective: str) -> None:
    base = make_checkpoint(tmp_path / "base", tied=True)
    pairs = generate_preferences(TASKS.get("sums"), tmp_path, PreferenceConfig(num_train=16, num_val=12), score)
    section = {"train": f"[{pairs.train}]", "val": f"[{pairs.val}]", "batch_size": 8, "val_every_steps": 2}
    settings = [f"train_preference.{key}={value}" for key, value in section.items()]
    where = [f"run.dir={tmp_path}", f"model.path={base}", f"train_preference.objective={objective}"]
    fast = ["actor.optimizer.schedule=constant", "actor.optimizer.lr=1e-3"]
    # The reference has ranks of its own layout. Two epochs of two steps; then one more step.
    first = ["actor.layout.dp=2", "reference.layout={tp: 2}", "train_preference.total_epochs=2"]
    then = ["actor.layout.dp=1", "train_preference.total_steps=5", "--resume"]
    for changed in (first, then):
        printed = run_to_end(
            tmp_path / "cwd", "train-preference", str(RUN_FILE), *SMALL, *where, *settings, *fast, *changed
        )
    assert "validation on 12 pairs: accuracy" in printed
    run = RunPaths(tmp_path / "dpo")
    records = read_metrics(run.metrics)
    trained = {r.step: r.metrics for r in records if "preference/accuracy" in r.metrics}
    held_out = {r.step: r.metrics for r in records if "val/preference/accuracy" in r.metrics}
    assert (sorted(trained), sorted(held_out)) == ([1, 2, 3, 4, 5], [0, 2, 4, 5])
    # The policy is the reference: no reward differs, and every σ is ½.
    start = held_out[0]
    assert start["val/preference/margin"] == pytest.approx(0, abs=1e-4)
    assert start["val/preference/loss"] == pytest.approx(0.6931 if objective == "dpo" else 0.5, abs=1e-3)
    # All pairs were seen twice.
    assert trained[5]["actor/loss"] < trained[1]["actor/loss"] - 0.005
    assert trained[5]["preference/margin"] > 0.01
    assert run.report_html.is_file()
    load_hf(run.export)
