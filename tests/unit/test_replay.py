"""Many samples, odd numbers and several steps through a record; refusals are tested next to the other sources."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from megarl.config.generation import Sampling
from megarl.rollout.replay import ReplaySource, read_record, record_path, write_record
from megarl.rollout.source import SamplingPlan, collect
from megarl.types import FinishReason, RolloutBatch, Sample, Segment, SegmentSource, row_from_sample, version_spans
from tests.helpers.loops import begin_groups, just_wait
from tests.helpers.rollouts import NUM_SAMPLES, assert_same_rollout, random_rollout


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    batch = random_rollout()
    path = tmp_path / "records" / "step.parquet"
    write_record(path, batch)
    assert_same_rollout(read_record(path), batch)


def test_experts_are_kept(tmp_path: Path) -> None:
    """Of those samples that have some; and records of before they were kept are read."""
    batch = random_rollout()
    rng = np.random.default_rng(0)
    samples = [
        replace(
            sample,
            routed_experts=rng.integers(
                -1, 128, (len(sample.prompt_token_ids) + len(sample.response_token_ids), 3, 2)
            ).astype(np.int16),
        )
        if i % 2
        else sample
        for i, sample in enumerate(batch.samples)
    ]
    batch = replace(batch, samples=tuple(samples))
    path = tmp_path / "r.parquet"
    write_record(path, batch)
    read = read_record(path)
    assert_same_rollout(read, batch)
    for got, expected in zip(read.samples, batch.samples, strict=True):
        if expected.routed_experts is None:
            assert got.routed_experts is None
        else:
            assert got.routed_experts is not None
            assert got.routed_experts.dtype == np.int16
            assert np.array_equal(got.routed_experts, expected.routed_experts)
            assert row_from_sample(got).routed_experts is got.routed_experts

    pq.write_table(pq.read_table(path).drop_columns("routed_experts"), path)
    assert all(sample.routed_experts is None for sample in read_record(path).samples)


def sample_of(first: Segment, logprobs: list[float], *, seed: int = 0) -> Sample:
    """A sample with this prompt segment and a response of these log-probs."""
    n = len(logprobs)
    response = Segment(
        source=SegmentSource.DEMONSTRATION,
        token_ids=np.arange(n, dtype=np.int32),
        loss_mask=np.ones(n, dtype=np.bool_),
        versions=version_spans(np.zeros(n, dtype=np.int64)),
        rollout_logprobs=np.array(logprobs, dtype=np.float32),
    )
    return Sample(
        uid="prompt-0", sample_index=9, seed=seed, segments=(first, response), finish_reason=FinishReason.ABORT
    )


def test_extreme_values(tmp_path: Path) -> None:
    """A seed of 63 bits, negative zero, a subnormal, infinity and NaN; an empty response."""
    usual = random_rollout()
    prompt = usual.samples[0].segments[0]
    odd = sample_of(prompt, [-0.0, 1e-45, -np.inf, np.nan, 0.1], seed=2**63 - 1)
    batch = RolloutBatch(prompts=usual.prompts, samples=(odd, *usual.samples, sample_of(prompt, [])))
    write_record(tmp_path / "r.parquet", batch)
    assert_same_rollout(read_record(tmp_path / "r.parquet"), batch)


def test_steps_are_answered_in_the_order_they_were_asked(tmp_path: Path) -> None:
    batches = {step: random_rollout(seed=step) for step in (3, 4)}
    source, asked = ReplaySource(tmp_path), []
    for step, batch in batches.items():
        write_record(record_path(tmp_path, step), batch)
        plan = SamplingPlan(
            step=step,
            num_samples=NUM_SAMPLES,
            sampling=Sampling(temperature=1.0),
            max_response_tokens=64,
            run_seed=0,
        )
        asked.append(begin_groups(source, list(batch.prompts.values()), plan))
    for answered, batch in zip(asked, batches.values(), strict=True):
        assert_same_rollout(collect(just_wait, answered, timeout_s=1.0), batch)
