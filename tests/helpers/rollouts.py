"""A rollout as a sampler would return it: groups, varied lengths, an environment's turn, an answer left out."""

from typing import Any

import numpy as np

from megarl.types import (
    FinishReason,
    FloatArray,
    Prompt,
    RolloutBatch,
    Sample,
    Segment,
    SegmentSource,
    prompt_segment,
    version_spans,
)
from tests.helpers.checkpoints import VOCAB_SIZE

NUM_SAMPLES = 4
# Prompt lengths; a prompt of one token predicts its first label from itself.
PROMPT_TOKENS = (5, 1, 12)
MAX_SEGMENT_TOKENS = 14


def random_rollout(seed: int = 0) -> RolloutBatch:
    """Three prompts with four samples each. Sample 1 of each has an environment segment in its middle; the last
    sample of all is left out of the loss."""
    rng = np.random.default_rng(seed)
    prompts = {}
    samples = []
    for number, length in enumerate(PROMPT_TOKENS):
        uid = f"prompt-{number}"
        prompt = Prompt(
            uid=uid,
            token_ids=tuple(int(t) for t in rng.integers(0, VOCAB_SIZE, length)),
            data_source="sums",
            ground_truth=str(number),
            extra_info={"index": number, "tags": ["a", "ü"]},
        )
        prompts[uid] = prompt
        for index in range(NUM_SAMPLES):
            trained = (number, index) != (len(PROMPT_TOKENS) - 1, NUM_SAMPLES - 1)
            segments = [prompt_segment(prompt.token_ids), _policy_segment(rng, trained=trained)]
            if index == 1:
                segments += [_environment_segment(rng), _policy_segment(rng)]
            samples.append(
                Sample(
                    uid=uid,
                    sample_index=index,
                    seed=int(rng.integers(1 << 62)),
                    segments=tuple(segments),
                    finish_reason=[FinishReason.STOP, FinishReason.LENGTH][index % 2],
                )
            )
    return RolloutBatch(prompts=prompts, samples=tuple(samples))


def assert_same_rollout(got: RolloutBatch, expected: RolloutBatch) -> None:
    """Equal, with every array equal bit by bit."""
    assert dict(got.prompts) == dict(expected.prompts)
    assert len(got.samples) == len(expected.samples)
    for left, right in zip(got.samples, expected.samples, strict=True):
        for name in ("uid", "sample_index", "seed", "finish_reason"):
            assert getattr(left, name) == getattr(right, name)
        assert [s.source for s in left.segments] == [s.source for s in right.segments]
        for mine, theirs in zip(left.segments, right.segments, strict=True):
            for name in ("token_ids", "loss_mask", "weight_versions", "rollout_logprobs", "nucleus"):
                _assert_same_array(getattr(mine, name), getattr(theirs, name))


def _assert_same_array(got: Any, expected: Any) -> None:
    if expected is None:
        assert got is None
    else:
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes()


def _policy_segment(rng: np.random.Generator, *, trained: bool = True) -> Segment:
    n = int(rng.integers(1, MAX_SEGMENT_TOKENS + 1))
    return Segment(
        source=SegmentSource.POLICY,
        token_ids=rng.integers(0, VOCAB_SIZE, n, dtype=np.int32),
        loss_mask=np.full(n, trained),
        versions=version_spans(rng.integers(0, 5, n)),
        rollout_logprobs=_logprobs(rng, n),
    )


def _environment_segment(rng: np.random.Generator) -> Segment:
    return Segment(
        source=SegmentSource.ENVIRONMENT,
        token_ids=rng.integers(0, VOCAB_SIZE, 3, dtype=np.int32),
        loss_mask=np.zeros(3, dtype=np.bool_),
        versions=version_spans(np.full(3, -1)),
    )


def _logprobs(rng: np.random.Generator, n: int) -> FloatArray:
    return -rng.exponential(2.0, n).astype(np.float32)
