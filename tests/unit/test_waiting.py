"""A wait in a test ends when its condition holds, and a failed one says what was waited for and what was seen."""

import subprocess
import sys

import pytest

from tests.helpers.waiting import wait_until


def test_the_first_true_value_is_returned() -> None:
    values = iter([0, [], "there", "never asked for"])
    assert wait_until(lambda: next(values), "something") == "there"


def test_a_late_condition_is_named_with_what_was_seen() -> None:
    with pytest.raises(AssertionError, match=r"^waited for steps: not within 0\.02 s; last seen: 3$"):
        wait_until(lambda: False, "steps", timeout_s=0.02, seen=lambda: 3)


def test_a_process_that_ended_ends_the_wait_unless_it_met_the_condition() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as process:
        with pytest.raises(AssertionError, match=r"^waited for steps: the process ended with 7; last seen: None$"):
            wait_until(lambda: None, "steps", process=process)
        assert wait_until(lambda: 1, "steps", process=process) == 1
