"""A run whose policy has collapsed ends, with its checkpoint and its export."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from megarl.record.checkpoints import complete_steps
from megarl.train.validate import score_of
from tests.helpers.kill_resume import SmallRun, make_inputs

# All answers are right until the first step is recorded, and none is later.
REWARD = """
from pathlib import Path

METRICS = Path({metrics!r})

def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(not METRICS.exists() or '"actor/lr"' not in METRICS.read_text())
"""


def test_a_collapsed_run_ends(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    settings = (
        *("actor.layout={tp: 1, dp: 1, sequence_parallel: false}", "trainer.total_steps=9", "validation.every_steps=1"),
        *("validation.stop_after_zeros=2", f"rewards.custom={{path: {tmp_path / 'reward.py'}, name: score}}"),
    )
    run = SmallRun(inputs=inputs, name="collapsed", settings=settings)
    (tmp_path / "reward.py").write_text(REWARD.format(metrics=str(run.paths.metrics)))
    log = run.paths.root.with_suffix(".log")
    assert run.start().wait() == 0, log.read_text()
    scores = [score_of(record.metrics, "val/test_score") for record in run.records()]
    assert [score for score in scores if score is not None] == [1.0, 0.0, 0.0]
    assert (run.last_step(), complete_steps(run.paths.checkpoints)[-1]) == (2, 2)
    assert "step 2: the policy has collapsed (validations in a row of 0: 2); the run ends here" in log.read_text()
    assert json.loads(run.paths.status.read_text())["state"] == "finished"
    assert (run.paths.export / "config.json").is_file()

    # As after a kill before the export.
    shutil.rmtree(run.paths.export)
    assert run.start().wait() == 0, log.read_text()
    assert run.last_step() == 2
    assert (run.paths.export / "config.json").is_file()

    longer = replace(run, settings=(*settings, "validation.stop_after_zeros=4"))
    assert longer.start().wait() == 0, log.read_text()
    assert run.last_step() == 4
