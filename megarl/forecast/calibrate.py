"""Calibrate the forecast with a recorded run: its own lengths, and a factor for each phase from its metrics."""

import math
from pathlib import Path

import numpy as np

from megarl.errors import DataError
from megarl.forecast.costs import Constants
from megarl.forecast.recorded import COUNTERS, column, recorded_steps
from megarl.forecast.step import planned_step
from megarl.plan.derive import H100_BYTES
from megarl.record.metrics import RunPaths

# The parts of a step beside generation and the weights' sync.
_TRAINED = ("old_log_prob", "ref", "values", "update_critic", "update_actor")


def calibrate(recorded: Path, *, device_bytes: int = H100_BYTES) -> Constants:
    """Return constants with which the forecast for a recorded run reproduces its median step.

    recorded: the run's directory, or its timeline.jsonl or metrics.jsonl. Raises DataError as `recorded_steps`.
    """
    if not recorded.exists():
        raise DataError(f"--calibration: no such file: {recorded}; name the timeline.jsonl of a run")
    config, steps = recorded_steps(RunPaths(recorded if recorded.is_dir() else recorded.parent))
    lengths = float(np.mean(column(steps, "response_length/mean"))) / config.rollout.max_response_tokens
    published = Constants(mean_share=min(1.0, lengths))
    planned = planned_step(config, device_bytes=device_bytes, constants=published)
    if not 0 < planned.generate < math.inf:
        raise DataError(
            f"{recorded}: its engines' KV cache does not hold a row; expected a run that fits; name another"
        )
    generate, busy, sync, step = (
        float(np.median(column(steps, name)))
        for name in ("timing_s/gen", COUNTERS[-1], "timing_s/sync", "timing_s/step")
    )
    train = float(np.median(sum(column(steps, f"timing_s/{phase}") for phase in _TRAINED)))
    if planned.overlaps:
        # The step did not wait for all of the engines' work.
        generate = busy / config.rollout.engine.num_engines or planned.generate
    return Constants(
        mean_share=published.mean_share,
        step_s=0.0 if planned.overlaps else max(0.0, step - generate - train - sync),
        generate=generate / planned.generate,
        train=train / planned.train,
        sync=sync / planned.sync,
    )
