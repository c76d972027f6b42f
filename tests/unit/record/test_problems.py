"""Samples that could not be judged: which are picked, what is written, and that a resumed run goes on in the file."""

from pathlib import Path

from megarl.config.schema import Config, LoggingConfig, ModelConfig, RunConfig
from megarl.record.problems import MAX_RESPONSE_CHARS, pick_problems, read_problems
from megarl.record.recorder import RunRecorder
from megarl.types.judged import Trouble
from tests.helpers.reward_items import item


def trouble(prompt: str, outcome: str, *, response: str = "?", judge: str = "rule") -> Trouble:
    return Trouble(item=item(prompt, response, "8"), outcome=outcome, reason="because", output="said", judge=judge)


def config(tmp_path: Path, **logging: int) -> Config:
    return Config(
        run=RunConfig(name="a", dir=str(tmp_path)), model=ModelConfig(path="m"), logging=LoggingConfig(**logging)
    )


def test_rare_kinds_are_picked_beside_frequent_ones() -> None:
    many = [trouble(f"p{i}", "parse_failed") for i in range(9)]
    rare = [trouble("x", "crashed"), trouble("y", "parse_failed", judge="style")]
    picked = pick_problems([*many, *rare], 4)
    assert [each.item.prompt.uid for each in picked] == ["p0", "x", "y", "p1"]
    assert pick_problems(many, 0) == []


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    recorder = RunRecorder(config(tmp_path, num_reward_problems=2))
    assert read_problems(recorder.paths.problems) == []
    long = "x" * MAX_RESPONSE_CHARS + "the end"
    recorder.problems(1, [trouble("p", "failed", response=long), trouble("q", "failed"), trouble("r", "failed")])
    recorder.problems(2, [])
    recorder.problems(2, [trouble("v", "timed_out")], phase="validation")
    first, second, third = read_problems(recorder.paths.problems)
    assert (first.step, first.phase, first.judge, first.outcome, first.reason, first.output) == (
        1,
        "train",
        "rule",
        "failed",
        "because",
        "said",
    )
    assert (first.uid, first.data_source, first.ground_truth, first.prompt) == ("p", "d", "8", "p")
    assert first.response == long[7:]
    assert (second.uid, third.uid, third.phase) == ("q", "v", "validation")


def test_a_resumed_run_repeats_its_last_steps(tmp_path: Path) -> None:
    recorder = RunRecorder(config(tmp_path))
    for step in (1, 2, 3):
        recorder.problems(step, [trouble(f"p{step}", "failed")])
    resumed = RunRecorder(config(tmp_path), resumed_step=2)
    resumed.problems(3, [trouble("again", "failed")])
    assert [each.uid for each in read_problems(resumed.paths.problems)] == ["p1", "p2", "again"]
