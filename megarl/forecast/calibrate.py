"""Calibrate the forecast with a recorded run: its own lengths, and a factor for each phase from its metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megarl.config.load import read_yaml, saved_config
from megarl.config.schema import Config
from megarl.errors import DataError
from megarl.forecast.costs import PUBLISHED, Constants, step_cost
from megarl.host.device.platform import assuming
from megarl.plan.recompute import H100_BYTES
from megarl.plan.sizes import size_run
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
    published = replace(PUBLISHED, mean_share=min(1.0, lengths))
    with assuming("cuda"):
        planned = step_cost(size_run(config, device_bytes), constants=published)
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
