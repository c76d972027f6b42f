"""`plan-async` against recorded runs, and the pace that they kept."""

import json
from pathlib import Path

import pytest

from megarl.config.load import dump, with_overrides
from megarl.config.schema import Config
from megarl.record.metrics import JsonlSink, MetricsRecord, RolloutRecord, RunPaths, write_rollouts
from megarl.rollout.stepping import EngineWork, Stepper
from tools.bench import paced
from tools.bench.async_plan import LIMIT, compare

# What the four runs of `python -m tools.bench.async_plan` logged of their steps, and the lengths that they sampled.
RECORDED = json.loads((Path(__file__).parent / "async_plan.json").read_text())


def replay(name: str, root: Path) -> Path:
    """Write a recorded run as a run's directory."""
    recorded, paths = RECORDED[name], RunPaths(root)
    root.mkdir()
    paths.config.write_text(dump(with_overrides(Config(), recorded["settings"])))
    sink = JsonlSink(paths.metrics)
    for record in recorded["records"]:
        metrics = dict(zip(RECORDED["metrics"], record["values"], strict=True))
        sink.write(MetricsRecord(step=record["step"], time_s=record["time_s"], metrics=metrics))
    sink.close()
    for step, groups in recorded["groups"].items():
        rows = [
            RolloutRecord(
                step=int(step),
                uid=str(i),
                sample_index=j,
                reward=0.0,
                num_prompt_tokens=prompt,
                num_response_tokens=length,
                **dict.fromkeys(("data_source", "prompt", "response", "ground_truth", "finish_reason"), "x"),
            )
            for i, (prompt, *lengths) in enumerate(groups)
            for j, length in enumerate(lengths)
        ]
        write_rollouts(paths.rollouts(int(step)), rows)
    return root


def test_steps_of_four_recorded_runs_are_simulated_from_the_synchronous_one(tmp_path: Path) -> None:
    names = [name for name in RECORDED if name != "metrics"]
    assert len(names) == 4
    found = compare({name: replay(name, tmp_path / str(i)) for i, name in enumerate(names)}, skipped=5)
    assert {each.contender: abs(each.ratio - 1) <= LIMIT for each in found} == dict.fromkeys(names, True)


class Clock:
    """A clock that goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_paced_engine_takes_its_time_and_makes_up_for_a_step_that_took_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(paced, "time", clock)
    for patched, name in ((EngineWork, "add_step"), (Stepper, "held")):
        monkeypatch.setattr(patched, name, getattr(patched, name))
    paced.pace_engines()
    work = EngineWork()
    # A step of 10 sequences takes 45 ms, however fast it was.
    clock.now = 100.001
    work.add_step(100.0, 100.001, 10)
    assert clock.now == pytest.approx(100.045)
    # The next one took 70 ms: it is 25 ms late, and the one after it has 20 ms left.
    clock.now = 100.115
    work.add_step(100.045, 100.115, 10)
    assert clock.now == pytest.approx(100.115)
    work.add_step(100.115, 100.115, 10)
    assert clock.now == pytest.approx(100.135)
    # After a pause nothing is made up for.
    clock.now = 101.0
    work.add_step(101.0, 101.0, 0)
    assert clock.now == pytest.approx(101.040)
    assert (work.num_steps, work.num_sequences) == (4, 30)
