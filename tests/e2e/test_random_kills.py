"""Runs are killed at random moments and resumed until they finish: they equal runs that nobody killed."""

import random
import time
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.kill_resume import (
    SCHEDULES,
    SmallRun,
    asynchronous_faults,
    differences,
    draw_moment,
    kill_at,
    make_inputs,
)
from tests.helpers.rewriting import rewriting_settings

SEED, NUM_KILLS, NUM_STEPS = 0, 20, 6


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("schedule", "trees"),
    [*((schedule, False) for schedule in SCHEDULES), ("sync", True)],
    ids=[*SCHEDULES, "trees"],
)
def test_twenty_kills_lose_nothing(schedule: str, trees: bool, tmp_path: Path) -> None:
    """What trains under `async` depends on time: there the finished run's records are sampled again."""
    settings = (f"trainer.total_steps={NUM_STEPS}", *SCHEDULES[schedule], *(rewriting_settings() if trees else ()))
    run_of, rng = partial(SmallRun, inputs=make_inputs(tmp_path), settings=settings), random.Random(SEED)
    reference, run, began = run_of(name="reference"), run_of(name="killed0"), time.time()
    assert reference.start().wait() == 0
    duration_s = time.time() - began
    num_kills = num_finished = 0
    while num_kills < NUM_KILLS or run.paths.root.exists():
        process, moment = run.start(), draw_moment(rng, duration_s, trees=trees)
        killed = kill_at(process, run, moment) if num_kills < NUM_KILLS else None
        log = run.paths.root.with_suffix(".log")
        if killed is not None:
            num_kills += 1
            assert killed.leftovers == (), log.read_text()
            continue
        assert process.wait() == 0, log.read_text()
        is_async = schedule == "async"
        found = asynchronous_faults(run, reference, NUM_STEPS)[0] if is_async else differences(run, reference)
        assert found == []
        num_finished += 1
        run = run_of(name=f"killed{num_finished}")
    assert num_finished > 0
