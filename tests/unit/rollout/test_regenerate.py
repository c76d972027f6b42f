"""How a recorded sample is taken apart into what one request sampled from one version, and put to the test."""

from pathlib import Path

import numpy as np
import pytest

from megarl.config.generation import Sampling
from megarl.errors import DataError
from megarl.rollout.engine import Completion
from megarl.rollout.regenerate import spans_of
from megarl.rollout.source import SamplingPlan
from megarl.types import (
    Episode,
    FinishReason,
    Sample,
    Segment,
    SegmentSource,
    environment_segment,
    prompt_segment,
    version_spans,
)
from megarl.types.forks import Fork
from megarl.types.seeds import try_seed
from megarl.types.turns import Tries
from tests.helpers.segments import demonstration_segment

PLAN = SamplingPlan(step=3, num_samples=2, sampling=Sampling(temperature=0.7), max_response_tokens=9, run_seed=0)


def written(token_ids: list[int], versions: list[int]) -> Segment:
    n = len(token_ids)
    return Segment(
        source=SegmentSource.POLICY,
        token_ids=np.asarray(token_ids),
        loss_mask=np.ones(n, dtype=np.bool_),
        versions=version_spans(np.asarray(versions)),
        rollout_logprobs=-np.arange(n, dtype=np.float32),
    )


def sample() -> Sample:
    """A prefix, a request that an update came to, and another request after a resume, by the same version."""
    segments = (
        prompt_segment([1, 2]),
        demonstration_segment([9]),
        written([5, 6, 7], [2, 2, 3]),
        written([8, 4], [3, 3]),
    )
    return Sample(uid="q", sample_index=1, seed=77, segments=segments, finish_reason=FinishReason.STOP)


def test_a_span_is_a_request_of_its_own() -> None:
    spans = list(spans_of(Path("r"), sample()))
    assert [(span.start, span.end, span.before, span.num_before) for span in spans] == [
        (0, 2, (1, 2, 9), 0),
        (2, 3, (1, 2, 9, 5, 6), 2),
        (0, 2, (1, 2, 9, 5, 6, 7), 3),
    ]
    request = spans[1].request(PLAN)
    assert (request.token_ids, request.num_before, request.max_tokens) == ((1, 2, 9, 5, 6), 2, 1)
    assert (request.seed, request.sampling.temperature) == (77, 0.7)


def test_spans_of_a_conversation_that_forks_are_sampled_on_their_own_paths() -> None:
    """A turn of five tokens by two versions, a branch within the prompt, and one that repeats it."""
    segments = (
        prompt_segment([1, 2, 3]),
        written([5, 6, 7, 8, 9], [2, 2, 2, 3, 3]),
        environment_segment([10]),
        written([11, 12], [3, 3]),
        environment_segment([]),
        written([13], [3]),
    )
    forked = Sample(
        uid="q",
        sample_index=1,
        seed=77,
        segments=segments,
        finish_reason=FinishReason.STOP,
        forks=(Fork(8, 1), Fork(11, 2)),
    )
    assert [(span.start, span.end, span.before, span.num_before) for span in spans_of(Path("r"), forked)] == [
        (0, 3, (1, 2, 3), 0),
        (3, 5, (1, 2, 3, 5, 6, 7), 3),
        (0, 2, (1, 2, 10), 5),
        (0, 1, (1, 2, 3), 7),
    ]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "message"),
    [
        ([8, 4], [0.0, -1.0], None),
        ([8, 3], [0.0, -1.0], "generated token 4, by version 3, is token 3 with log-prob -1, and was 4 with -1"),
        ([8, 4], [0.5, -1.0], "generated token 3, by version 3, is token 8 with log-prob 0.5, and was 8 with -0"),
        ([8], [0.0], "generated token 4, by version 3, is nothing, and was 4 with -1"),
    ],
)
def test_differences_are_named(tokens: list[int], logprobs: list[float], message: str | None) -> None:
    last = list(spans_of(Path("r"), sample()))[-1]
    completion = Completion(
        token_ids=np.asarray(tokens),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        finish_reason=FinishReason.LENGTH,
        versions=version_spans(np.full(len(tokens), 3)),
    )
    if message is None:
        last.compare(completion)
    else:
        with pytest.raises(DataError, match=f"r: sample q/1 is sampled differently now: {message}"):
            last.compare(completion)


def test_turns_of_several_chats_have_seeds_by_their_place() -> None:
    """A turn, one more and two tries of another chat at the same time, and a turn after all of them."""
    segments = [prompt_segment([1]), written([5, 6], [2, 2]), environment_segment([9]), written([10], [2])]
    segments += [environment_segment([3]), written([11], [2]), environment_segment([]), written([12], [2])]
    segments += [environment_segment([8]), written([14], [2])]
    forked = Sample(
        uid="q",
        sample_index=1,
        seed=77,
        segments=tuple(segments),
        finish_reason=FinishReason.STOP,
        forks=(Fork(5, 0), Fork(7, 5), Fork(8, 4)),
        episode=Episode(environment="e", num_turns=5, tries=(Tries(1, 1, 0), Tries(2, 2, 0, (), 1), Tries(4, 1, 1))),
    )
    spans = [(span.before, span.num_before, span.seed) for span in spans_of(Path("r"), forked)]
    assert spans == [
        ((1,), 0, 77),
        ((1, 5, 6, 9), 2, 77),
        ((1, 3), 2, try_seed(77, 1)),
        ((1, 3), 2, try_seed(77, 2)),
        ((1, 5, 6, 9, 10, 8), 5, 77),
    ]


def test_tries_have_seeds_of_their_own_and_do_not_count_each_other() -> None:
    """A turn, three tries of the next one, of which the second had two requests, and a turn after the first."""
    segments = [prompt_segment([1]), written([5, 6], [2, 2]), environment_segment([9]), written([10], [2])]
    segments += [environment_segment([]), written([11], [2]), written([12], [2])]
    segments += [environment_segment([]), written([13], [2]), environment_segment([8]), written([14], [2])]
    forked = Sample(
        uid="q",
        sample_index=1,
        seed=77,
        segments=tuple(segments),
        finish_reason=FinishReason.STOP,
        forks=(Fork(5, 3), Fork(7, 3), Fork(8, 4)),
        episode=Episode(environment="e", num_turns=5, tries=(Tries(1, 3, 0), Tries(4, 1, 1))),
    )
    spans = [(span.before, span.num_before, span.seed) for span in spans_of(Path("r"), forked)]
    seeds = [try_seed(77, i) for i in range(3)]
    assert spans == [
        ((1,), 0, 77),
        ((1, 5, 6, 9), 2, 77),
        ((1, 5, 6, 9), 2, seeds[1]),
        ((1, 5, 6, 9, 11), 3, seeds[1]),
        ((1, 5, 6, 9), 2, seeds[2]),
        ((1, 5, 6, 9, 10, 8), 6, 77),
    ]
    assert len({*seeds, 77}) == 3
