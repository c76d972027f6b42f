"""The loss and the estimator of the tutorial, from a user's file, in a run, its continuation, and its refusal."""

import json
from pathlib import Path

import pytest

from megarl.host.exit_codes import EXIT_BAD_INPUT
from megarl.record.plugins import copy_of, record_of
from tests.e2e.test_tutorials import BLOCK, PAGES
from tests.helpers.kill_resume import SmallRun, make_inputs


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_users_loss_and_estimator_train_under_tp2_resume_and_are_refused_once_changed(tmp_path: Path) -> None:
    """Two gloo ranks, two steps and one more; SmallRun's advantages and gradients are those of the user's parts."""
    (page,) = (page for page in PAGES if page.stem == "own-algorithm")
    for _, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            (tmp_path / title).write_text(text, encoding="utf-8")
    inputs, parts = make_inputs(tmp_path), tmp_path / "my_parts.py"
    settings = (
        f"use.algo={tmp_path / 'own.yaml'}",
        f"algo.plugins=[{parts}]",
        "data.val=[]",
        "actor.optimizer.warmup_steps=0",
    )

    def finish(num_steps: int) -> int:
        return (
            SmallRun(inputs=inputs, name="own", settings=(*settings, f"trainer.total_steps={num_steps}")).start().wait()
        )

    run = SmallRun(inputs=inputs, name="own")
    log = run.paths.root.with_suffix(".log")
    for num_steps in (2, 3):
        assert finish(num_steps) == 0, log.read_text()[-4000:]
    metrics = [record.metrics for record in run.records() if "actor/lr" in record.metrics]
    assert len(metrics) == 3
    # One optimizer step per batch: every ratio is 1, and its logarithm 0.
    assert [each["actor/soft_ratio"] for each in metrics] == [0.0] * 3
    assert "continuing after step 2" in log.read_text()
    record = json.loads(record_of(run.paths).read_text())
    assert record["my_parts.py"]["path"] == str(parts)
    assert copy_of(run.paths, "my_parts.py").read_bytes() == parts.read_bytes()

    changed = parts.read_text().replace("torch.tanh", "torch.sin")
    parts.write_text(changed)
    assert finish(4) == EXIT_BAD_INPUT
    said = log.read_text().splitlines()[-1]
    assert said.startswith(f"error: {parts}: has changed since {run.paths.root} was begun: got the SHA-256 ")
    assert said.endswith(
        f"restore it from {copy_of(run.paths, 'my_parts.py')}, or start a new run with another run.name"
    )
