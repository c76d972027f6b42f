"""Runs whose engines generate while the trainer works: what samples are made of, and that runs can be repeated."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.record.checkpoints import last_checkpoint
from megarl.rollout.replay import read_record, record_path
from megarl.types import Sample, SegmentSource
from tests.helpers.expert_checkpoint import make_moe
from tests.helpers.kill_resume import SCHEDULES, SmallRun, asynchronous_faults, differences, make_inputs
from tests.helpers.killed import command_of, kill
from tests.helpers.rewriting import rewriting_settings
from tests.helpers.talk import talk_settings
from tests.helpers.waiting import wait_until

NUM_STEPS = 12
ASYNC = (*SCHEDULES["async"], f"trainer.total_steps={NUM_STEPS}", "data.val=[]", "checkpoint.every_steps=0")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("async"))


# Whether vLLM's engine core is a process of its own, which is vLLM's default on CUDA.
INSIDE, APART = ({"VLLM_ENABLE_V1_MULTIPROCESSING": value} for value in "01")


def with_experts(inputs: Path) -> tuple[str, ...]:
    make_moe(inputs / "experts", seed=0)
    return (f"model.path={inputs}/experts", "actor.layout={tp: 1, sequence_parallel: false, dp: 2, ep: 2}")


VARIANTS: dict[str, tuple[Callable[[Path], tuple[str, ...]], dict[str, str]]] = {
    "one engine": (lambda _: (), INSIDE),
    # By load, requests that were kept back would come while `held_engines` waits for an update, which waits for them;
    # `test_partial_rollouts` routes by load.
    "two engines": (lambda _: ("rollout.engine.num_engines=2", "rollout.schedule.routing=in_turns"), INSIDE),
    # Updates come in the middle of turns and between them.
    "conversations": (lambda inputs: talk_settings(calls=inputs / "calls"), INSIDE),
    "experts": (with_experts, INSIDE),
    "core apart": (lambda _: (), APART),
}
FIRST, *FURTHER = "one engine", "conversations", "two engines", "experts", "core apart"


@pytest.fixture(scope="module", params=[FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in FURTHER)])
def recorded(inputs: Path, request: pytest.FixtureRequest) -> SmallRun:
    """An asynchronous run, with every version of its policy in NAME-versions."""
    settings_of, environment = VARIANTS[request.param]
    run = SmallRun(
        inputs=inputs,
        name=request.param.replace(" ", "-"),
        settings=(*ASYNC, *settings_of(inputs)),
        environment=environment,
    )
    arguments = run.arguments[run.arguments.index("train") :]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.e2e.versions_run", str(versions_directory(run)), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | dict(run.environment),
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return run


def versions_directory(run: SmallRun) -> Path:
    return run.paths.root.with_name(f"{run.name}-versions")


def samples_of(run: SmallRun) -> list[Sample]:
    steps = range(1, NUM_STEPS + 1)
    return [sample for step in steps for sample in read_record(record_path(run.paths.records, step)).samples]


def recorded_rows(run: SmallRun, step: int) -> list[dict[str, Any]]:
    """A step's record without the seconds that environments took, and how many of their hosts died."""
    rows: list[dict[str, Any]] = pq.read_table(record_path(run.paths.records, step)).to_pylist()
    for row in rows:
        row["episode"] = row["episode"] and json.loads(row["episode"]) | {"seconds": None, "num_restarts": None}
    return rows


def num_tool_calls(run: SmallRun) -> int:
    """How often environments of these inputs replied so far, in all runs."""
    calls = run.inputs / "calls"
    return calls.stat().st_size if calls.exists() else 0


def versions_of(sample: Sample) -> np.ndarray:
    """The version of each token of the response; -1 for what an environment wrote."""
    return np.concatenate([segment.weight_versions for segment in sample.segments[1:]])


def test_every_token_was_sampled_by_the_version_that_it_names(recorded: SmallRun) -> None:
    """Each log-prob is that of its version, by transformers; by the version before, it is another."""
    samples = samples_of(recorded)
    spanning = sum(len(np.unique(v[v >= 0])) > 1 for v in map(versions_of, samples))
    assert spanning >= 0.3 * len(samples)
    errors, neighbours = [], []
    for version in range(NUM_STEPS):
        directory = versions_directory(recorded) / str(version)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        for sample in samples:
            versions = versions_of(sample)
            if not np.isin(versions, [version, version + 1]).any():
                continue
            ids = torch.from_numpy(np.concatenate([sample.prompt_token_ids, sample.response_token_ids]))
            with torch.no_grad():
                logprobs = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            difference = np.abs(logprobs.numpy()[-len(versions) :] - sample.rollout_logprobs)
            errors.append(difference[versions == version])
            neighbours.append(difference[versions == version + 1])
    assert np.concatenate(errors).max() <= 1e-4
    assert np.concatenate(neighbours).mean() > 1e-4


def test_staleness_is_bounded_and_logged(recorded: SmallRun) -> None:
    lags = {
        step: [
            step - 1 - (versions := versions_of(sample))[versions >= 0]
            for sample in read_record(record_path(recorded.paths.records, step)).samples
        ]
        for step in range(1, NUM_STEPS + 1)
    }
    assert max(int(lag.max()) for each in lags.values() for lag in each) == 2
    # The trainer's log-probs are the engine's, in all turns of tokens that the step's own weights sampled.
    assert max(record.metrics.get("mismatch/abs_max", 0.0) for record in recorded.records()) <= 1e-4
    for record in recorded.records():
        tokens = np.concatenate(lags[record.step])
        assert record.metrics["staleness/lag_max"] == tokens.max()
        assert record.metrics["staleness/lag_mean"] == pytest.approx(tokens.mean(), rel=1e-6)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_recorded_run_is_executed_again_to_the_bit(recorded: SmallRun) -> None:
    """Prompts come in the order of the synchronous run; tokens, log-probs and the final weights are equal. No tool is
    called again."""
    num_calls = num_tool_calls(recorded)
    faults, _ = asynchronous_faults(recorded, recorded, NUM_STEPS)
    assert faults == []
    assert num_tool_calls(recorded) == num_calls
    assert (num_calls > 0) == ("conversations" in recorded.name)


@pytest.mark.long
@pytest.mark.parametrize("recorded", ["conversations"], indirect=True)
def test_a_replay_trains_to_the_same_weights_and_calls_no_tool(recorded: SmallRun) -> None:
    num_calls = num_tool_calls(recorded)
    replay = ("rollout.record=false", "rollout.source=replay", f"rollout.replay_dir={recorded.paths.records}")
    run = replace(recorded, name="conversations-replayed", settings=(*recorded.settings, *replay))
    assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()
    exports = [(each.paths.export / "model.safetensors").read_bytes() for each in (run, recorded)]
    assert exports[0] == exports[1]
    assert num_tool_calls(recorded) == num_calls


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recorded", [FIRST], indirect=True)
def test_what_is_sampled_differently_is_named(recorded: SmallRun) -> None:
    spoiled = recorded.inputs / "runs" / "spoiled"
    spoiled.mkdir()
    for step in range(1, NUM_STEPS + 1):
        rows = pq.read_table(record_path(recorded.paths.records, step)).to_pylist()
        if step == 1:
            rows[0]["segments"][1]["rollout_logprobs"][3] += 0.5
        table = pa.Table.from_pylist(rows, schema=pq.read_schema(record_path(recorded.paths.records, step)))
        pq.write_table(table, record_path(spoiled, step))
    replay = ("rollout.record=false", "rollout.source=regenerate", f"rollout.replay_dir={spoiled}")
    run = replace(recorded, name="spoiled-again", settings=(*recorded.settings, *replay))
    assert run.start().wait() != 0
    sample = samples_of(recorded)[0]
    named = f"sample {sample.uid}/{sample.sample_index} is sampled differently now: generated token 3, by version 0"
    assert named in run.paths.root.with_suffix(".log").read_text()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "more",
    [
        (),
        # Turns and replies of several samples come in another order each time.
        (*talk_settings(), "rollout.max_response_tokens=128"),
        rewriting_settings(),
        # Tries side by side, which end in any order.
        (*talk_settings(kind="Search"), "rollout.max_response_tokens=128", "environment.max_tokens=400"),
    ],
    ids=["answers", "conversations", "trees", "tries"],
)
def test_a_deterministic_run_one_step_off_equals_its_repetition(more: tuple[str, ...], inputs: Path) -> None:
    """Also when it is resumed from a checkpoint, with groups that engines had finished for the next step."""
    settings = ("trainer.total_steps=5", "use.schedule=one_step_off", "data.val=[]", "rollout.record=true", *more)
    whole = SmallRun(inputs=inputs, name=f"whole{len(more)}", settings=(*settings, "checkpoint.keep_last=5"))
    assert whole.start().wait() == 0
    lags = [record.metrics["staleness/lag_mean"] for record in whole.records()]
    assert lags == [0.0, 1.0, 1.0, 1.0, 1.0]
    part = SmallRun(inputs=inputs, name=f"part{len(more)}", settings=settings)
    part.paths.root.mkdir(parents=True)
    checkpoint = "checkpoints/step_000002"
    (part.paths.root / "checkpoints").mkdir()
    subprocess.run(["cp", "-r", whole.paths.root / checkpoint, part.paths.root / checkpoint], check=True)
    lines = whole.paths.metrics.read_text().splitlines(keepends=True)
    part.paths.metrics.write_text("".join(lines[:2]))
    assert part.start().wait() == 0
    assert differences(part, whole) == []
    for step in range(3, 6):
        assert recorded_rows(part, step) == recorded_rows(whole, step)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("environment", "more"),
    [
        (INSIDE, ()),
        (APART, ()),
        (INSIDE, talk_settings()),
        (INSIDE, talk_settings(kind="Forgetful")),
        (INSIDE, rewriting_settings()),
    ],
    ids=["core inside", "core apart", "conversations", "conversations begin again", "trees"],
)
def test_a_killed_run_goes_on_with_its_unfinished_samples(
    environment: dict[str, str], more: tuple[str, ...], inputs: Path, request: pytest.FixtureRequest
) -> None:
    """It loses no prompt and repeats none, and what it sampled in parts is sampled again to the bit."""
    name = f"killed-{request.node.callspec.id}".replace(" ", "-")
    settings = (*ASYNC, *more, "checkpoint.every_steps=1")
    run = SmallRun(inputs=inputs, name=name, settings=settings, environment=environment)
    process = run.start()
    try:
        wait_until(
            lambda: run.last_step() >= NUM_STEPS // 2,
            "the middle of the run",
            timeout_s=1200.0,
            seen=run.paths.root.with_suffix(".log").read_text,
            process=process,
        )
        commands = [" ".join(command_of(each)) for each in psutil.Process(process.pid).children(recursive=True)]
        assert any("VLLM::EngineCore" in command for command in commands) == (environment is APART)
        assert kill(process).leftovers == ()
    finally:
        process.kill()
        process.wait()
    stopped = last_checkpoint(run.paths.checkpoints)
    assert stopped is not None
    assert stopped.state.step < NUM_STEPS
    assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()
    whole = replace(run, name=f"{name}-not")
    assert whole.start().wait() == 0
    faults, _ = asynchronous_faults(run, whole, NUM_STEPS)
    assert faults == []
    if "Forgetful" in str(more):
        return
    if more == rewriting_settings():
        assert all(len(sample.forks) == 4 for sample in samples_of(run))
        return
    sources = [[each.source for each in sample.segments] for sample in samples_of(run)]
    # What an engine wrote after the resume is a segment of its own.
    assert any(pair == (SegmentSource.POLICY, SegmentSource.POLICY) for each in sources for pair in pairwise(each))
