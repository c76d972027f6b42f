"""Samples that engines interrupt, or pass on to each other, go on where they were, with the next weights."""

from pathlib import Path

import numpy as np
import pytest

from megarl.rollout.replay import read_record, record_path
from tests.helpers.kill_resume import SCHEDULES, SmallRun, asynchronous_faults, make_inputs

NUM_STEPS = 5


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", ["placement.mode=colocated", "rollout.engine.num_engines=2"])
def test_interrupted_samples_go_on_with_the_next_weights_and_regenerate(more: str, tmp_path: Path) -> None:
    """With a checkpoint after each step, for which nothing is lost, and validations in between.

    One engine that shares the trainer's devices, or two that have their own, and get samples by load.
    """
    settings = (*SCHEDULES["async"], more, f"trainer.total_steps={NUM_STEPS}")
    run = SmallRun(inputs=make_inputs(tmp_path), name="partial", settings=settings)
    assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()
    samples = [
        sample
        for step in range(1, NUM_STEPS + 1)
        for sample in read_record(record_path(run.paths.records, step)).samples
    ]
    versions = [np.concatenate([segment.weight_versions for segment in s.segments[1:]]) for s in samples]
    assert any(len(np.unique(each)) > 1 for each in versions)
    if "colocated" in more:
        # Engines are interrupted before each update.
        segments = [segment for sample in samples for segment in sample.segments[1:]]
        assert all(len(np.unique(segment.weight_versions)) == 1 for segment in segments)
    trained = [record.metrics for record in run.records() if "staleness/lag_max" in record.metrics]
    assert 1 <= max(metrics["staleness/lag_max"] for metrics in trained) <= 2
    # The trainer's log-probs are the engine's, for tokens of the step's own weights.
    assert max(metrics.get("mismatch/abs_max", 0.0) for metrics in trained) <= 1e-4
    faults, _ = asynchronous_faults(run, run, NUM_STEPS)
    assert faults == []
