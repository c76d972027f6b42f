"""What VllmSource asks of engines and makes of their answers, with engines that answer from a table."""

from collections.abc import Sequence

import numpy as np
import pytest

from megarl.errors import NonFiniteError
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import SamplingPlan, sample_seed
from megarl.rollout.vllm_source import VllmSource
from megarl.types import FinishReason, Prompt, SegmentSource

PLAN = SamplingPlan(step=4, num_samples=2, temperature=0.7, top_p=0.9, top_k=5, max_response_tokens=3, run_seed=11)
PROMPTS = [
    Prompt(uid=uid, token_ids=ids, data_source="d", ground_truth="1") for uid, ids in (("a", (1, 2)), ("b", (3,)))
]


class EchoEngines:
    """Answers each request with its prompt reversed, under weight version 9; keeps what it was asked."""

    def __init__(self, *, logprob: float = -0.5) -> None:
        self.logprob = logprob
        self.requests: list[GenerationRequest] = []
        self.timeouts_s: list[float] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        self.requests += requests
        return list(requests)

    def collect(self, calls: Sequence[GenerationRequest], *, timeout_s: float) -> list[Completion]:
        self.timeouts_s.append(timeout_s)
        return [
            Completion(
                token_ids=np.asarray(request.token_ids[::-1], dtype=np.int64),
                logprobs=np.full(len(request.token_ids), self.logprob, dtype=np.float32),
                finish_reason=FinishReason.LENGTH,
                weight_version=9,
            )
            for request in calls
        ]


def test_every_sample_is_a_request_with_its_own_seed() -> None:
    engines = EchoEngines()
    VllmSource(engines).submit(PROMPTS, PLAN)
    assert [(r.token_ids, r.seed) for r in engines.requests] == [
        ((1, 2), sample_seed(11, 4, "a", 0)),
        ((1, 2), sample_seed(11, 4, "a", 1)),
        ((3,), sample_seed(11, 4, "b", 0)),
        ((3,), sample_seed(11, 4, "b", 1)),
    ]
    for request in engines.requests:
        assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (0.7, 0.9, 5, 3)


def test_samples_name_prompt_group_seed_and_weights() -> None:
    engines = EchoEngines()
    source = VllmSource(engines)
    source.submit(PROMPTS, PLAN)
    batch = source.collect(2, timeout_s=8.0)
    assert engines.timeouts_s == [8.0]
    assert batch.prompts == {"a": PROMPTS[0], "b": PROMPTS[1]}
    assert [(s.uid, s.sample_index) for s in batch.samples] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    sample = batch.samples[1]
    assert sample.seed == sample_seed(11, 4, "a", 1)
    assert sample.finish_reason is FinishReason.LENGTH
    prompt, response = sample.segments
    assert (prompt.source, response.source) == (SegmentSource.PROMPT, SegmentSource.POLICY)
    assert prompt.token_ids.tolist() == [1, 2]
    assert response.token_ids.tolist() == [2, 1]
    assert response.loss_mask.tolist() == [True, True]
    assert response.weight_versions.tolist() == [9, 9]
    assert sample.rollout_logprobs.tolist() == [-0.5, -0.5]


def test_submissions_are_collected_in_their_order() -> None:
    source = VllmSource(EchoEngines())
    source.submit(PROMPTS[:1], PLAN)
    source.submit(PROMPTS[1:], PLAN)
    assert [source.collect(1, timeout_s=1.0).samples[0].uid for _ in range(2)] == ["a", "b"]


def test_a_wrong_number_of_groups_is_refused() -> None:
    source = VllmSource(EchoEngines())
    source.submit(PROMPTS, PLAN)
    with pytest.raises(ValueError, match="asked for 1 groups, the oldest submission has 2"):
        source.collect(1, timeout_s=1.0)


def test_loading_state_forgets_what_was_submitted() -> None:
    source = VllmSource(EchoEngines())
    source.submit(PROMPTS[:1], PLAN)
    source.load_state_dict(source.state_dict())
    source.submit(PROMPTS[1:], PLAN)
    assert source.collect(1, timeout_s=1.0).samples[0].uid == "b"


def test_nan_from_the_engine_names_step_and_row() -> None:
    source = VllmSource(EchoEngines(logprob=float("nan")))
    source.submit(PROMPTS, PLAN)
    with pytest.raises(NonFiniteError, match="step 4: rollout log-probs of row a/0 are not finite"):
        source.collect(2, timeout_s=1.0)
