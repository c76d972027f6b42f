"""What the end-to-end benchmark makes of its runs: steps from metrics, medians, shares, the table, memory."""

import json
import os
from pathlib import Path

import pytest

from megarl_lab.bench.end_to_end import (
    ContenderResult,
    ContenderRun,
    TimedStep,
    our_steps,
    pss_bytes,
    result,
    run_process,
    table,
)
from megarl_lab.bench.end_to_end_trl import share_of_digits


def step(time_s: float, **phases: float) -> TimedStep:
    return TimedStep(time_s=time_s, phases=phases, num_tokens=600, response_tokens=400)


def test_both_contenders_get_the_digits_per_character_as_reward() -> None:
    assert share_of_digits(["12ab", "", [{"role": "assistant", "content": "1"}]]) == [0.5, 0.0, 1.0]


def test_steps_are_read_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    timing = {f"timing_s/{key}": 0.5 for key in ("gen", "reward", "update_actor", "sync", "adv")}
    lengths = {"response_length/mean": 3.0, "prompt_length/mean": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time_s": 7.0, "metrics": timing | lengths}) + "\n")
    phases = dict.fromkeys(("generate", "reward", "update", "sync"), 0.5)
    assert our_steps(tmp_path / "metrics.jsonl", 10) == [
        TimedStep(time_s=7.0, phases=phases, num_tokens=50.0, response_tokens=30.0)
    ]


def test_a_result_leaves_the_first_steps_out_and_the_rest_of_a_step_is_other() -> None:
    steps = [step(end, generate=1.0, update=2.0) for end in (110.0, 120.0, 124.0, 128.0)]
    # What comes after the last step does not count.
    memory = [[(105.0, 1 << 30), (128.0, 3 << 30), (129.0, 9 << 30)], [(105.0, 2 << 30)]]
    runs = [ContenderRun(contender="megarl", began_s=100.0, steps=steps, memory=each) for each in memory]
    got = result(runs, 8, skip=2)
    assert got == ContenderResult(
        contender="megarl",
        step_s=4.0,
        samples_per_s=2.0,
        tokens_per_s=150.0,
        response_tokens=50.0,
        first_step_s=10.0,
        peak_gib=3.0,
        shares={"generate": 0.25, "update": 0.5, "other": 0.25},
    )


def test_what_a_contender_does_not_measure_is_its_update() -> None:
    steps = [step(end, generate=1.0) for end in (0.0, 4.0)]
    got = result([ContenderRun(contender="TRL", began_s=0.0, steps=steps, memory=[])], 8, skip=1)
    assert got.shares == {"generate": 0.25, "update": 0.75}


def test_the_table_compares_with_the_last_contender() -> None:
    def made(name: str, seconds: float) -> ContenderResult:
        steps = [step(0.0, generate=1.0), step(seconds, generate=1.0)]
        return result([ContenderRun(contender=name, began_s=0.0, steps=steps, memory=[])], 8, skip=1)

    lines = table([made("megarl", 2.0), made("TRL", 4.0)])
    assert [line.split()[0] for line in lines[1:]] == ["megarl", "TRL"]
    assert [line.split()[-1] for line in lines] == ["ratio", "2.00", "1.00"]


def test_memory_is_that_of_a_process_and_its_children() -> None:
    assert pss_bytes(os.getpid()) > 1 << 20
    assert pss_bytes(2**22 + 1) == 0


def test_a_command_that_fails_ends_the_benchmark_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="false … ended with 1; see "):
        run_process(["false"], tmp_path / "log", os.environ)
