"""Runs whose engines generate while the trainer works: what samples are made of, and that runs can be repeated."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.rollout.replay import read_record, record_path
from megarl.types import Sample
from tools.bench.kill_resume import SCHEDULES, SmallRun, asynchronous_faults, differences, make_inputs

NUM_STEPS = 12
ASYNC = (*SCHEDULES["async"], f"trainer.total_steps={NUM_STEPS}", "data.val=[]", "checkpoint.every_steps=0")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def recorded(inputs: Path) -> SmallRun:
    """An asynchronous run, with every version of its policy in NAME-versions."""
    run = SmallRun(inputs=inputs, name="recorded", settings=ASYNC)
    versions = inputs / "runs" / "recorded-versions"
    arguments = run.arguments[run.arguments.index("train") :]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.e2e.versions_run", str(versions), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return run


def samples_of(run: SmallRun) -> list[Sample]:
    steps = range(1, NUM_STEPS + 1)
    return [sample for step in steps for sample in read_record(record_path(run.paths.records, step)).samples]


def versions_of(sample: Sample) -> np.ndarray:
    return np.concatenate([segment.weight_versions for segment in sample.segments[1:]])


def test_every_token_was_sampled_by_the_version_that_it_names(recorded: SmallRun) -> None:
    """Each log-prob is that of its version, by transformers; by the version before, it is another."""
    samples = samples_of(recorded)
    spanning = sum(len(np.unique(versions_of(sample))) > 1 for sample in samples)
    assert spanning >= 0.3 * len(samples)
    errors, neighbours = [], []
    for version in range(NUM_STEPS):
        directory = recorded.inputs / "runs" / "recorded-versions" / str(version)
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
        step: [step - 1 - versions_of(s) for s in read_record(record_path(recorded.paths.records, step)).samples]
        for step in range(1, NUM_STEPS + 1)
    }
    assert max(int(lag.max()) for each in lags.values() for lag in each) == 2
    for record in recorded.records():
        tokens = np.concatenate(lags[record.step])
        assert record.metrics["staleness/lag_max"] == tokens.max()
        assert record.metrics["staleness/lag_mean"] == pytest.approx(tokens.mean(), rel=1e-6)


@pytest.mark.timeout(300)
def test_a_recorded_run_is_executed_again_to_the_bit(recorded: SmallRun) -> None:
    """Prompts come in the order of the synchronous run; tokens, log-probs and the final weights are equal."""
    faults, _ = asynchronous_faults(recorded, recorded, NUM_STEPS)
    assert faults == []


@pytest.mark.long
@pytest.mark.timeout(300)
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
    run = SmallRun(inputs=recorded.inputs, name="spoiled-again", settings=(*ASYNC, *replay))
    assert run.start().wait() != 0
    sample = samples_of(recorded)[0]
    named = f"sample {sample.uid}/{sample.sample_index} is sampled differently now: generated token 3, by version 0"
    assert named in run.paths.root.with_suffix(".log").read_text()


@pytest.mark.timeout(300)
def test_a_deterministic_run_one_step_off_equals_its_repetition(inputs: Path) -> None:
    """Also when it is resumed from a checkpoint, with groups that engines had finished for the next step."""
    settings = ("trainer.total_steps=6", "use.schedule=one_step_off", "data.val=[]")
    whole = SmallRun(inputs=inputs, name="whole", settings=(*settings, "checkpoint.keep_last=6"))
    assert whole.start().wait() == 0
    lags = [record.metrics["staleness/lag_mean"] for record in whole.records()]
    assert lags == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    part = SmallRun(inputs=inputs, name="part", settings=settings)
    part.paths.root.mkdir(parents=True)
    checkpoint = "checkpoints/step_000002"
    (part.paths.root / "checkpoints").mkdir()
    subprocess.run(["cp", "-r", whole.paths.root / checkpoint, part.paths.root / checkpoint], check=True)
    lines = whole.paths.metrics.read_text().splitlines(keepends=True)
    part.paths.metrics.write_text("".join(lines[:2]))
    assert part.start().wait() == 0
    assert differences(part, whole) == []
