"""What the end-to-end benchmark makes of its runs: medians, the table, memory."""

import os
from pathlib import Path

import pytest

from megarl_lab.bench.end_to_end import ContenderResult, TimedRun, pss_bytes, result, run_process, table
from megarl_lab.bench.end_to_end_trl import share_of_digits


def test_both_contenders_get_the_digits_per_character_as_reward() -> None:
    assert share_of_digits(["12ab", "", [{"role": "assistant", "content": "1"}]]) == [0.5, 0.0, 1.0]


def test_a_result_leaves_the_first_steps_out() -> None:
    # What comes after the last step does not count.
    memory = [[(105.0, 1 << 30), (128.0, 3 << 30), (129.0, 9 << 30)], [(105.0, 2 << 30)]]
    runs = [TimedRun(began_s=100.0, steps=[110.0, 120.0, 124.0, 128.0], memory=each) for each in memory]
    assert result("megarl", runs, 8, skip=2) == ContenderResult(
        contender="megarl", samples_per_s=2.0, first_step_s=10.0, peak_gib=3.0
    )


def test_the_table_compares_with_the_last_contender() -> None:
    def made(name: str, seconds: float) -> ContenderResult:
        return result(name, [TimedRun(began_s=0.0, steps=[0.0, seconds], memory=[])], 8, skip=1)

    lines = table([made("megarl", 2.0), made("TRL", 4.0)])
    assert [line.split()[0] for line in lines[1:]] == ["megarl", "TRL"]
    assert [line.split()[-1] for line in lines] == ["ratio", "2.00", "1.00"]


def test_memory_is_that_of_a_process_and_its_children() -> None:
    assert pss_bytes(os.getpid()) > 1 << 20
    assert pss_bytes(2**22 + 1) == 0


def test_a_command_that_fails_ends_the_benchmark_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="false … ended with 1; see "):
        run_process(["false"], tmp_path / "log", os.environ)
