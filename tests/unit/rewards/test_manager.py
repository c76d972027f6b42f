"""Rewards of a batch."""

import json

import numpy as np
import pytest

from megarl.data.chat import response_decoder
from megarl.data.tiny_model import make_byte_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.rewards import RewardManager
from megarl.types import FinishReason, Prompt, RolloutBatch, Sample, Segment, SegmentSource, prompt_segment

TOKENIZER = make_byte_tokenizer()
MANAGER = RewardManager(response_decoder(TOKENIZER))


def prompt(uid: str, data_source: str, ground_truth: str) -> Prompt:
    return Prompt(uid=uid, token_ids=(1,), data_source=data_source, ground_truth=ground_truth)


def sample(uid: str, index: int, *texts: str, finish_reason: FinishReason = FinishReason.STOP) -> Sample:
    segments = []
    for text in texts:
        ids = np.asarray(TOKENIZER(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        segments.append(
            Segment(
                source=SegmentSource.POLICY,
                token_ids=ids,
                loss_mask=np.ones(len(ids), dtype=np.bool_),
                weight_versions=np.zeros(len(ids), dtype=np.int64),
            )
        )
    return Sample(
        uid=uid,
        sample_index=index,
        seed=0,
        # The prompt must not be scored: it holds a right answer of the other prompt.
        segments=(prompt_segment(TOKENIZER("#### 8")["input_ids"]), *segments),
        finish_reason=finish_reason,
    )


PROMPTS = {
    "a": prompt("a", "megarl/sums", "8"),
    "b": prompt("b", "megarl/countdown", json.dumps({"numbers": [4, 5, 9], "target": 8})),
}


def test_rewards_in_the_order_of_the_samples() -> None:
    batch = RolloutBatch(
        prompts=PROMPTS,
        samples=(
            sample("b", 0, "<answer>4+9-5</answer><|im_end|>"),
            sample("a", 0, "#### 9<|im_end|>"),
            sample("a", 1, "3+5=8\n#### 8<|im_end|>"),
            sample("b", 1, "<answer>4+5+9</answer><|im_end|>"),
        ),
    )
    assert [r.score for r in MANAGER.score(batch)] == [1.0, 0.0, 1.0, 0.0]
    assert [r.correct for r in MANAGER.score(batch)] == [True, False, True, False]


def test_truncated_empty_and_split_responses_are_scored_as_text() -> None:
    batch = RolloutBatch(
        prompts=PROMPTS,
        samples=(
            sample("a", 0, "#### 8", finish_reason=FinishReason.LENGTH),
            sample("a", 1, "3+5=", finish_reason=FinishReason.LENGTH),
            sample("a", 2),
            sample("b", 0, "<answer>4+9", "-5</answer>"),
        ),
    )
    assert [r.score for r in MANAGER.score(batch)] == [1.0, 0.0, 0.0, 1.0]


def test_errors_name_the_sample_or_the_source() -> None:
    bad = RolloutBatch(prompts={"b": prompt("b", "megarl/countdown", "8")}, samples=(sample("b", 3, "x"),))
    with pytest.raises(DataError, match="sample b/3: countdown ground truth is '8'"):
        MANAGER.score(bad)
    unknown = RolloutBatch(prompts={"c": prompt("c", "chess", "e4")}, samples=(sample("c", 0, "e4"),))
    with pytest.raises(ConfigError, match="unknown data source 'chess'"):
        MANAGER.score(unknown)
