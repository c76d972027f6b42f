"""Plans of large models: how long processes wait for each other, by the benchmark's own clock."""

import pytest

from tools.bench.sync_plans import SCENARIOS, plan_scenario


def check(number: int) -> None:
    planned = plan_scenario(SCENARIOS[number])
    assert planned.bytes_are_least
    assert planned.bound_seconds <= planned.in_turn_seconds <= 1.2 * planned.bound_seconds


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.long)])
def test_one_message_at_a_time_takes_little_longer_than_the_bound(number: int) -> None:
    """30B and 235B."""
    check(number)


@pytest.mark.long
@pytest.mark.parametrize("number", range(2, len(SCENARIOS)))
def test_the_largest_models_too(number: int) -> None:
    """671B, whose plans take some 5 s each, and 20 s for 512 devices."""
    check(number)
