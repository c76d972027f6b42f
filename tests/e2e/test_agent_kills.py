"""Environment workers with their endpoints, and programs in sandboxes, are killed while agents work on samples."""

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.rollout.replay import read_record, record_path
from megarl.types import Sample
from tests.e2e.test_agents import SIZES, make_talker
from tests.helpers import working_agent
from tests.helpers.kill_resume import SmallRun, differences, make_inputs
from tests.helpers.killed import command_of

NUM_KILLS, NUM_STEPS, NUM_SAMPLES, NUM_PROMPTS = 10, 20, 2, 2


def settings(name: str) -> tuple[str, ...]:
    arguments = (
        f"{{harness: '{working_agent.__file__}:start', check: [{sys.executable}, -c, \"{working_agent.CHECK}\"], "
        f"sandbox: {name}}}"
    )
    return (
        f"environment.entries={{mine: {{type: harness, arguments: {arguments}}}}}",
        *("environment.default=mine", "environment.max_tokens=2000", "environment.reply_timeout_s=200"),
        *("environment.hosts=2", "environment.max_host_restarts=30", "rewards.manager=environment"),
        *("rollout.max_response_tokens=1024", f"rollout.num_samples={NUM_SAMPLES}", "rollout.record=true"),
        *(f"trainer.prompts_per_step={NUM_PROMPTS}", f"trainer.total_steps={NUM_STEPS}", "data.val=[]"),
        *("checkpoint.every_steps=8", "rollout.engine.max_model_tokens=2048"),
    )


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    inputs = make_inputs(tmp_path)
    make_talker(tmp_path / "model", replace(SIZES, max_positions=4096))
    return SmallRun(inputs=inputs, name="whole", settings=settings("process"))


def is_worker(process: psutil.Process) -> bool:
    return command_of(process)[:1] == ["ray::EnvironmentWorkerActor"]


def is_agent(process: psutil.Process) -> bool:
    return working_agent.__file__ in command_of(process)


def finish(run: SmallRun, is_target: Callable[[psutil.Process], bool]) -> None:
    """Run to the end; meanwhile, at random moments while agents work, kill a process of a kind.

    At most once in a step: a sample during which two workers die has failed.
    """
    rng, process, num_kills, last_step = random.Random(0), run.start(), 0, -2
    try:
        family = psutil.Process(process.pid)
        while process.poll() is None and num_kills < NUM_KILLS:
            others = family.children(recursive=True)
            targets = [each for each in others if is_target(each)]
            if run.last_step() == last_step or not targets or not any(map(is_agent, others)):
                time.sleep(0.05)
                continue
            time.sleep(rng.uniform(0.0, 1.0))
            target = rng.choice(targets)
            if target.is_running() and is_target(target):
                last_step = run.last_step()
                target.kill()
                num_kills += 1
        assert process.wait() == 0, run.paths.root.with_suffix(".log").read_text()
    finally:
        process.kill()
        process.wait()
    assert num_kills == NUM_KILLS


def samples_of(run: SmallRun) -> list[tuple[Sample, ...]]:
    return [read_record(record_path(run.paths.records, step)).samples for step in range(1, NUM_STEPS + 1)]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_workers_and_sandboxes_that_are_killed_lose_nothing(run: SmallRun) -> None:
    """Another worker takes the place of a killed one, and its samples are those of a run in which none was killed.

    What a killed program does not do is missing from its sample alone, as if the program had ended so by itself. Both
    runs regenerate to the bit from what they recorded.
    """
    assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()
    workers, sandboxes = replace(run, name="workers"), replace(run, name="sandboxes")
    finish(workers, is_worker)
    assert sum(record.metrics.get("environment/restarts", 0) for record in workers.records()) == NUM_KILLS
    assert differences(workers, run) == []

    finish(sandboxes, is_agent)
    expected, found = samples_of(run), samples_of(sandboxes)
    for wanted, got in zip(expected, found, strict=True):
        places = [[(each.uid, each.sample_index) for each in step] for step in (wanted, got)]
        assert places[0] == places[1]
        assert len(got) == NUM_PROMPTS * NUM_SAMPLES
    # Those of the first step are of the same weights.
    for wanted, got in zip(expected[0], found[0], strict=True):
        reason = got.episode is not None and got.episode.reason
        assert reason or np.array_equal(got.token_ids, wanted.token_ids)
    raised = [each for step in found for each in step if each.episode is not None and each.episode.reason]
    assert len(raised) == NUM_KILLS

    for finished in (workers, sandboxes):
        again = ("rollout.record=false", "rollout.source=regenerate", f"rollout.replay_dir={finished.paths.records}")
        repeated = replace(finished, name=f"{finished.name}-again", settings=(*finished.settings, *again))
        assert repeated.start().wait() == 0, repeated.paths.root.with_suffix(".log").read_text()
        assert differences(repeated, finished) == []
