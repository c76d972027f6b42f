"""Read the steps of a recorded run, by which a forecast is calibrated."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megarl.config.load import read_yaml, saved_config
from megarl.config.schema import Config
from megarl.errors import DataError
from megarl.record.metrics import RunPaths, read_metrics

Array = npt.NDArray[np.float64]

# The first step loads caches and compiles.
NUM_SKIPPED, LEAST_STEPS = 1, 2
COUNTERS = ("perf/engine_steps", "perf/engine_sequences", "perf/engine_busy_s")
_ALWAYS = ("timing_s/step", "timing_s/gen", "timing_s/sync", "timing_s/update_actor", "perf/tokens_per_s")
LENGTHS = ("response_length/mean", "response_length/max", "prompt_length/mean")


def recorded_steps(paths: RunPaths) -> tuple[Config, list[Mapping[str, float]]]:
    """Read a run's settings, and the metrics of its steps but for the first ones. Raises DataError if there are few."""
    records = read_metrics(paths.metrics)
    if not paths.config.is_file():
        raise DataError(f"{paths.root} is not a run directory: expected a config.yaml beside metrics.jsonl")
    by_step: dict[int, Mapping[str, float]] = {
        record.step: record.metrics for record in records if all(name in record.metrics for name in _ALWAYS + LENGTHS)
    }
    steps = [by_step[step] for step in sorted(by_step)][NUM_SKIPPED:]
    if len(steps) < LEAST_STEPS:
        raise DataError(
            f"{paths.metrics}: got {len(by_step)} steps of training with times and lengths, expected at least "
            f"{NUM_SKIPPED + LEAST_STEPS}; wait until the run has made them, or name another run"
        )
    return saved_config(read_yaml(paths.config)), steps


def column(steps: Sequence[Mapping[str, float]], name: str) -> Array:
    """Return a metric of all steps, 0 where a step does not have it."""
    return np.array([step.get(name, 0.0) for step in steps])
