"""Examples that run programs in the sandbox, drop thoughts or ask sub-agents, from nothing to a trained policy. Long,
since each takes minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.record.metrics import RunPaths, read_metrics
from tests.e2e.support import REPOSITORY

TIMEOUT_S = 1200.0


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("task", "source"),
    [
        ("python_calculator", "megarl/calculator"),
        ("repair", "megarl/repair"),
        ("tally", "megarl/tally"),
        ("delegate", "megarl/sums"),
    ],
)
def test_a_tiny_model_learns_from_replies(task: str, source: str, tmp_path: Path) -> None:
    # Not a part of the run that the tests themselves may have.
    environment = {key: value for key, value in os.environ.items() if key != "MEGARL_RUN_ID"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    ended = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "quickstart", "--task", task],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    records = read_metrics(RunPaths(tmp_path / "runs" / f"{task}-seed0" / "grpo").metrics)
    scores = [record.metrics[key] for record in records if (key := f"val/test_score/{source}") in record.metrics]
    assert scores[-1] - scores[0] >= 0.25
    for record in records:
        assert record.metrics.get("environment/failed_frac", 0.0) == 0.0
        # Log-probs are exact over all turns.
        assert record.metrics.get("mismatch/abs_max", 0.0) <= 1e-4
