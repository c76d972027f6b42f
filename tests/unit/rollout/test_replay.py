"""A recorded rollout comes back bit for bit, and only where it belongs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.generation import Sampling
from megarl.errors import DataError, NonFiniteError
from megarl.rollout.replay import ReplaySource, read_record, record_path, require_records, write_record
from megarl.rollout.source import SamplingPlan, collect
from megarl.types import (
    ChatPart,
    Episode,
    FinishReason,
    Message,
    Prompt,
    RolloutBatch,
    RowImage,
    Sample,
    Segment,
    SegmentSource,
    prompt_segment,
    row_from_sample,
    version_spans,
)
from megarl.types.turns import Tries
from tests.helpers.loops import begin_groups, just_wait

PROMPT = Prompt(
    uid="sums:7",
    token_ids=(5, 6),
    data_source="sums",
    ground_truth="12",
    extra_info={"index": 7, "note": None, "tags": ["a", "é"]},
    demonstration_ids=(9, 2),
    demonstration_probs=(1 / 3, -1.0),
    target="5 + 7 = 12",
)
# Neither is a short decimal: a detour over text or float64 rounding would show.
LOGPROBS = np.asarray([np.float32(-1) / np.float32(3), np.nextafter(np.float32(-2), np.float32(0))], dtype=np.float32)


def policy_segment() -> Segment:
    return Segment(
        source=SegmentSource.POLICY,
        token_ids=np.asarray([8, 2], dtype=np.int32),
        loss_mask=np.asarray([True, True]),
        versions=version_spans(np.asarray([3, 4], dtype=np.int64)),
        rollout_logprobs=LOGPROBS,
        nucleus=np.asarray([[8, 1, 5], [2, -1, -1]], dtype=np.int32),
    )


def environment_segment() -> Segment:
    return Segment(
        source=SegmentSource.ENVIRONMENT,
        token_ids=np.asarray([9], dtype=np.int32),
        loss_mask=np.asarray([False]),
        versions=version_spans(np.asarray([-1], dtype=np.int64)),
    )


def demonstration_segment() -> Segment:
    return Segment(
        source=SegmentSource.DEMONSTRATION,
        token_ids=np.asarray([9], dtype=np.int32),
        loss_mask=np.asarray([True]),
        versions=version_spans(np.asarray([-1], dtype=np.int64)),
    )


def batch() -> RolloutBatch:
    samples = [
        Sample(
            uid=PROMPT.uid,
            sample_index=i,
            seed=2**63 - 1 - i,
            segments=(prompt_segment(PROMPT.token_ids), *segments),
            finish_reason=reason,
        )
        for i, (segments, reason) in enumerate(
            [
                ((policy_segment(), environment_segment()), FinishReason.STOP),
                ((demonstration_segment(), policy_segment()), FinishReason.LENGTH),
            ]
        )
    ]
    return RolloutBatch(prompts={PROMPT.uid: PROMPT}, samples=tuple(samples))


def plan(step: int) -> SamplingPlan:
    return SamplingPlan(step=step, num_samples=2, sampling=Sampling(temperature=1.0), max_response_tokens=4, run_seed=0)


def test_a_record_comes_back_bit_for_bit(tmp_path: Path) -> None:
    write_record(record_path(tmp_path / "records", 12), batch())
    source = ReplaySource(tmp_path / "records")
    replayed = collect(just_wait, begin_groups(source, [PROMPT], plan(12)), timeout_s=1.0)
    assert replayed.prompts == batch().prompts
    for got, expected in zip(replayed.samples, batch().samples, strict=True):
        assert (got.uid, got.sample_index, got.seed) == (expected.uid, expected.sample_index, expected.seed)
        assert got.finish_reason is expected.finish_reason
        for segment, original in zip(got.segments, expected.segments, strict=True):
            assert segment.source is original.source
            for name in ("token_ids", "loss_mask", "weight_versions", "rollout_logprobs", "nucleus"):
                value, wanted = getattr(segment, name), getattr(original, name)
                assert (value is None) is (wanted is None)
                if wanted is not None:
                    assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape)
                    assert value.tobytes() == wanted.tobytes()


def with_images(digest: str) -> RolloutBatch:
    """Samples whose prompt shows an image, and one of which gets another one in a reply."""
    shown, reply = (RowImage(places=np.array([1], np.int32), digest=digest, grid=(1, 1)),), environment_segment()
    prompt = replace(PROMPT, images=shown)
    first, second = (
        replace(each, segments=(prompt_segment(PROMPT.token_ids, shown), *each.segments[1:]))
        for each in batch().samples
    )
    reply = replace(reply, images=(RowImage(places=np.array([0], np.int32), digest="b"),))
    first = replace(first, segments=(*first.segments[:-1], reply))
    return RolloutBatch(prompts={PROMPT.uid: prompt}, samples=(first, second))


def test_images_come_back_with_their_places(tmp_path: Path) -> None:
    write_record(tmp_path / "step.parquet", with_images("a"))
    read = read_record(tmp_path / "step.parquet")

    def told(images: Sequence[RowImage]) -> list[tuple[str, list[int], tuple[int, int] | None]]:
        return [(each.digest, each.places.tolist(), each.grid) for each in images]

    # Two tokens of the prompt, two of the policy, one of the reply.
    assert [told(row_from_sample(each).images) for each in read.samples] == [
        [("a", [1], (1, 1)), ("b", [4], None)],
        [("a", [1], (1, 1))],
    ]
    assert told(read.prompts[PROMPT.uid].images) == [("a", [1], (1, 1))]


def test_other_images_than_the_recorded_are_refused(tmp_path: Path) -> None:
    write_record(record_path(tmp_path, 1), with_images("a"))
    source, asked = ReplaySource(tmp_path), with_images("b").prompts[PROMPT.uid]
    with pytest.raises(DataError, match="its prompts are not those of this step"):
        begin_groups(source, [asked], plan(1))


def test_what_environments_said_is_recorded_only_if_it_is_marked(tmp_path: Path) -> None:
    path, (first, second) = tmp_path / "talk.parquet", batch().samples
    write_record(path, batch())
    assert "observed" not in pq.read_schema(path).names
    assert all(s.observed is None for sample in read_record(path).samples for s in sample.segments)
    said = replace(first.segments[2], observed=np.array([True]))
    told = replace(first, segments=(*first.segments[:2], said))
    write_record(path, replace(batch(), samples=(told, second)))
    read = read_record(path).samples
    assert [None if s.observed is None else s.observed.tolist() for s in read[0].segments] == [None, None, [True]]
    assert all(s.observed is None for s in read[1].segments)


def test_a_conversation_comes_back(tmp_path: Path) -> None:
    """Its prompt, too, where the environment opened it with other tokens."""
    first, second = batch().samples
    turn = replace(first.segments[1], reward=0.1)
    said = ChatPart(turn=1, messages=(Message(role="tool", content="4"), Message(role="user", content="?")), after=0)
    episode = Episode(
        environment="game", num_turns=2, seconds=0.1, awaits_reply=True, details={"a": [1, "b"]}, chat=(said,)
    )
    episode = replace(episode, tries=(Tries(0, 2, -1, (1,)), Tries(2, 1, 0)))
    opened = replace(first, segments=(prompt_segment([1, 2, 3]), turn, *first.segments[2:]), episode=episode)
    talk = RolloutBatch(prompts={PROMPT.uid: replace(PROMPT, environment="game")}, samples=(opened, second))
    write_record(tmp_path / "talk.parquet", talk)
    read = read_record(tmp_path / "talk.parquet")
    assert read.prompts == talk.prompts
    assert read.samples[0].episode == episode
    assert read.samples[1].episode is None
    assert [segment.reward for segment in read.samples[0].segments] == [0.0, 0.1, 0.0]
    assert read.samples[0].prompt_token_ids.tolist() == [1, 2, 3]


def test_a_record_from_before_nuclei_were_recorded(tmp_path: Path) -> None:
    path = record_path(tmp_path, 1)
    write_record(path, batch())
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        for segment in row["segments"]:
            del segment["nucleus"]
        # Nor had it conversations; the prompt's tokens were those of its samples.
        del row["rewards"], row["episode"]
        fields = json.loads(row["prompt"])
        del fields["token_ids"], fields["environment"]
        row["prompt"] = json.dumps(fields)
    pq.write_table(pa.Table.from_pylist(rows), path)
    replayed = read_record(path)
    assert [sample.nucleus for sample in replayed.samples] == [None, None]
    assert replayed.samples[0].rollout_logprobs.tobytes() == batch().samples[0].rollout_logprobs.tobytes()


def test_a_step_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    for step in (1, 2, 4):
        write_record(record_path(tmp_path, step), batch())
    require_records(tmp_path, 2)
    with pytest.raises(DataError, match=r"step_000003\.parquet does not exist; record it with rollout\.record=true"):
        require_records(tmp_path, 4)


@pytest.mark.parametrize(
    "other",
    [
        Prompt(uid="sums:8", token_ids=PROMPT.token_ids, data_source="sums", ground_truth="12"),
        Prompt(uid=PROMPT.uid, token_ids=(5, 7), data_source="sums", ground_truth="12"),
    ],
    ids=["uid", "tokens"],
)
def test_other_prompts_than_the_recorded_are_refused(tmp_path: Path, other: Prompt) -> None:
    write_record(record_path(tmp_path, 1), batch())
    source = ReplaySource(tmp_path)
    with pytest.raises(DataError, match=rf"step_000001\.parquet: .* \(first difference: {other.uid}\)"):
        begin_groups(source, [other], plan(1))


def test_another_group_size_is_refused(tmp_path: Path) -> None:
    write_record(record_path(tmp_path, 1), batch())
    source = ReplaySource(tmp_path)
    with pytest.raises(DataError, match=r"has 2 samples of sums:7; replay with rollout\.num_samples=2"):
        begin_groups(source, [PROMPT], replace(plan(1), num_samples=8))


def test_a_record_with_nan_names_step_and_row(tmp_path: Path) -> None:
    first, second = batch().samples
    spoiled = replace(second.segments[-1], rollout_logprobs=np.asarray([-1.0, np.nan], dtype=np.float32))
    samples = (first, replace(second, segments=(second.segments[0], spoiled)))
    write_record(record_path(tmp_path, 3), RolloutBatch(prompts={PROMPT.uid: PROMPT}, samples=samples))
    source = ReplaySource(tmp_path)
    with pytest.raises(NonFiniteError, match="step 3: rollout log-probs of row sums:7/1 are not finite"):
        begin_groups(source, [PROMPT], plan(3))


def test_a_record_answers_several_submissions_of_its_step(tmp_path: Path) -> None:
    """As with a filter, whose refills ask for more prompts in the same step."""
    other = replace(PROMPT, uid="sums:8")
    more = tuple(replace(sample, uid="sums:8") for sample in batch().samples)
    recorded = RolloutBatch(prompts={"sums:7": PROMPT, "sums:8": other}, samples=(*batch().samples, *more))
    write_record(record_path(tmp_path, 1), recorded)
    source = ReplaySource(tmp_path)
    for prompt in (other, PROMPT):
        replayed = collect(just_wait, begin_groups(source, [prompt], plan(1)), timeout_s=1.0)
        assert [(s.uid, s.sample_index) for s in replayed.samples] == [(prompt.uid, 0), (prompt.uid, 1)]
