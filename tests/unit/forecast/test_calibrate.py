"""A forecast by a run of one's own has that run's times, and its lengths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import dump, load_config
from megarl.errors import DataError
from megarl.forecast.calibrate import calibrate
from megarl.forecast.search import find_layouts
from tests.unit.forecast.test_plan_layouts import planned_step, run_file, search_for

# Means of the steps that count: 30 s of generation, 12 + 3 of training, 2 of sync, and 5 between them.
TIMES = {"step": 52.0, "gen": 30.0, "update_actor": 12.0, "old_log_prob": 3.0, "sync": 2.0}


def recorded(directory: Path, num_steps: int) -> Path:
    (choice,) = find_layouts(search_for("qwen3-1.7b", 4), most=1)
    (directory / "config.yaml").write_text(dump(load_config(run_file(directory, choice))))
    metrics = {f"timing_s/{name}": seconds for name, seconds in TIMES.items()} | {
        "perf/tokens_per_s": 1000.0,
        "response_length/mean": 1024.0,
        "response_length/max": 4096.0,
        "prompt_length/mean": 100.0,
    }
    lines = [json.dumps({"step": step, "time_s": 60.0 * step, "metrics": metrics}) for step in range(num_steps)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "timeline.jsonl").touch()
    return directory / "timeline.jsonl"


def test_the_forecast_of_a_recorded_run_is_what_it_took(tmp_path: Path) -> None:
    timeline = recorded(tmp_path, 4)
    assert calibrate(timeline) == calibrate(tmp_path)
    assert calibrate(timeline).mean_share == 1024 / 4096
    seconds = planned_step(load_config(tmp_path / "run.yaml"), constants=calibrate(timeline)).seconds
    expected = {"generate": 30.0, "train": 15.0, "sync": 2.0, "fixed": 5.0, "total": 52.0}
    assert seconds == pytest.approx(expected)


def test_twice_the_rows_take_twice_the_updates(tmp_path: Path) -> None:
    timeline = recorded(tmp_path, 4)
    config = load_config(tmp_path / "run.yaml")
    trainer = replace(
        config.trainer,
        prompts_per_step=2 * config.trainer.prompts_per_step,
        mini_batch_prompts=2 * config.trainer.mini_batch_prompts,
    )
    seconds = planned_step(replace(config, trainer=trainer), constants=calibrate(timeline)).seconds
    assert seconds["train"] == pytest.approx(30.0, rel=0.05)
    assert seconds["fixed"] == pytest.approx(5.0)


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got 2 steps of training with times and lengths, expected at least 3"):
        calibrate(recorded(tmp_path, 2))
