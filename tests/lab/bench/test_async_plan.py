"""The pace of the runs that `plan-async` is compared with."""

import pytest

from megarl.rollout.stepping import EngineWork, Stepper
from megarl_lab.bench import paced


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
