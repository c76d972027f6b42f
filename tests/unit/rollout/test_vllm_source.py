"""What VllmSource asks of engines and makes of their answers, with engines that answer from a table."""

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.generation import Sampling
from megarl.errors import NonFiniteError
from megarl.host import loop
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Doing, Prefix, SamplingPlan, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.train.prefixes import demonstration_quantities
from megarl.types import FinishReason, Prompt, Sample, SegmentSource, version_spans
from megarl.types.seeds import sample_seed
from tests.helpers.loops import answered, begin_groups

PLAN = SamplingPlan(
    step=4, num_samples=2, sampling=Sampling(temperature=0.7, top_p=0.9, top_k=5), max_response_tokens=3, run_seed=11
)
PROMPTS = [
    Prompt(uid=uid, token_ids=ids, data_source="d", ground_truth="1") for uid, ids in (("a", (1, 2)), ("b", (3,)))
]


class EchoEngines:
    """Answers each request with its prompt reversed, under versions 8 and, at last, 9, the last request first."""

    def __init__(self, *, logprob: float = -0.5) -> None:
        self.logprob = logprob
        self.requests: list[GenerationRequest] = []
        self.timeouts_s: list[float] = []
        self.asked: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []

    def generate(self, request: GenerationRequest) -> "asyncio.Future[Completion]":
        self.requests.append(request)
        completion: asyncio.Future[Completion] = loop.event_loop().create_future()
        self.asked.append((request, completion))
        return completion

    def wait(self, work: "asyncio.Future[None]", *, timeout_s: float, doing: Doing) -> None:
        self.timeouts_s.append(timeout_s)
        loop.wait(answered(work, self._answer))

    def _answer(self) -> None:
        asked, self.asked = self.asked, []
        for request, completion in reversed(asked):
            completion.set_result(self.complete(request))

    def parts(self) -> "dict[asyncio.Future[Completion], Completion]":
        """The first token of every request."""
        whole = {completion: self.complete(request) for request, completion in self.asked}
        return {
            completion: replace(
                c,
                token_ids=c.token_ids[:1],
                logprobs=c.logprobs[:1],
                versions=version_spans(c.weight_versions[:1]),
                finish_reason=FinishReason.ABORT,
            )
            for completion, c in whole.items()
        }

    def complete(self, request: GenerationRequest) -> Completion:
        token_ids = np.asarray(self.answer(request), dtype=np.int32)
        return Completion(
            token_ids=token_ids,
            logprobs=np.full(len(token_ids), self.logprob, dtype=np.float32),
            finish_reason=FinishReason.LENGTH,
            # A sync came before the last token.
            versions=version_spans(np.asarray([8] * (len(token_ids) - 1) + [9])),
        )

    def answer(self, request: GenerationRequest) -> Sequence[int]:
        return request.token_ids[::-1]


def test_every_sample_is_a_request_with_its_own_seed() -> None:
    engines = EchoEngines()
    begin_groups(VllmSource(engines), PROMPTS, PLAN)
    assert [(r.token_ids, r.seed) for r in engines.requests] == [
        ((1, 2), sample_seed(11, 4, "a", 0)),
        ((1, 2), sample_seed(11, 4, "a", 1)),
        ((3,), sample_seed(11, 4, "b", 0)),
        ((3,), sample_seed(11, 4, "b", 1)),
    ]
    for request in engines.requests:
        assert (request.sampling, request.max_tokens) == (Sampling(temperature=0.7, top_p=0.9, top_k=5), 3)


def test_the_last_sample_of_each_prompt_may_be_greedy() -> None:
    engines = EchoEngines()
    begin_groups(VllmSource(engines), PROMPTS, replace(PLAN, num_samples=3, last_is_greedy=True))
    assert [request.sampling.temperature for request in engines.requests] == [0.7, 0.7, 0.0] * 2


def test_nuclei_reach_the_samples() -> None:
    class Truncated(EchoEngines):
        """Every token was sampled from itself and token 7."""

        def complete(self, request: GenerationRequest) -> Completion:
            completion = super().complete(request)
            ids = completion.token_ids.astype(np.int32)
            return replace(completion, nucleus=np.stack([ids, np.full_like(ids, 7)], axis=1))

    engines = Truncated()
    source = VllmSource(engines)
    prefixes = {("b", 1): Prefix(token_ids=(5,))}
    groups = begin_groups(source, PROMPTS, replace(PLAN, with_nucleus=True, prefixes=prefixes))
    assert all(request.with_nucleus for request in engines.requests)
    nuclei = [sample.nucleus for sample in collect(engines.wait, groups, timeout_s=1.0).samples]
    assert [nucleus if nucleus is None else nucleus.tolist() for nucleus in nuclei] == [
        [[2, 7], [1, 7]],
        [[2, 7], [1, 7]],
        [[3, 7]],
        # A given token was not sampled.
        [[-1, -1], [5, 7], [3, 7]],
    ]
    assert not GenerationRequest(
        token_ids=(1,), seed=0, sampling=Sampling(temperature=1.0, top_p=0.9, top_k=5), max_tokens=1
    ).with_nucleus


def test_experts_of_all_computed_tokens_reach_the_samples() -> None:
    """Two layers, three experts per token: expert 10 · token + layer, whatever the place; the last token has none."""

    class Capturing(EchoEngines):
        def complete(self, request: GenerationRequest) -> Completion:
            completion = super().complete(request)
            tokens = np.asarray([*request.token_ids, *completion.token_ids[:-1]], dtype=np.int16)
            experts = np.stack([10 * tokens, 10 * tokens + 1], axis=1)
            return replace(completion, routed_experts=np.repeat(experts[:, :, None], 3, axis=2))

    source = VllmSource(engines := Capturing())
    prefixes = {("b", 1): Prefix(token_ids=(5,))}
    samples = collect(
        engines.wait, begin_groups(source, PROMPTS, replace(PLAN, prefixes=prefixes)), timeout_s=1.0
    ).samples
    found = [sample.routed_experts for sample in samples]
    assert [None if each is None else each[:, 1, 2].tolist() for each in found] == [
        [11, 21, 21, -1],
        [11, 21, 21, -1],
        [31, -1],
        [31, 51, 51, -1],
    ]
    assert all(each is not None and each.shape[1:] == (2, 3) and (each[-1] == -1).all() for each in found)


def test_what_ends_a_response_reaches_the_engine() -> None:
    engines = EchoEngines()
    sampling = Sampling(temperature=0.7, stop=("</answer>",), stop_token_ids=(7,))
    begin_groups(VllmSource(engines), PROMPTS, replace(PLAN, sampling=sampling))
    assert [request.sampling for request in engines.requests] == [sampling] * 4


def test_samples_name_prompt_group_seed_and_weights() -> None:
    engines = EchoEngines()
    source = VllmSource(engines)
    batch = collect(engines.wait, begin_groups(source, PROMPTS, PLAN), timeout_s=8.0)
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
    assert response.weight_versions.tolist() == [8, 9]
    assert sample.rollout_logprobs.tolist() == [-0.5, -0.5]


def test_a_submission_may_be_collected_before_an_earlier_one() -> None:
    source = VllmSource(engines := EchoEngines())
    asked = [begin_groups(source, PROMPTS[:1], PLAN), begin_groups(source, PROMPTS[1:], PLAN)]
    assert [collect(engines.wait, groups, timeout_s=1.0).samples[0].uid for groups in reversed(asked)] == ["b", "a"]


def test_samples_go_on_where_they_were() -> None:
    """Each request has a segment of its own, and knows how many tokens engines sampled before."""
    engines, again = EchoEngines(), EchoEngines()
    source = VllmSource(engines)
    plan = replace(PLAN, prefixes={("b", 1): Prefix(token_ids=(5,))})
    begun = source.parts(begin_groups(source, PROMPTS, plan))
    assert {sample.finish_reason for sample in begun} == {FinishReason.ABORT}
    resumed = VllmSource(again)
    groups = begin_groups(resumed, PROMPTS, plan, begun=begun[1:])
    # Sample 0 of prompt a begins again; the others have their first token, and b/1 a prefix that nobody sampled.
    assert [(r.token_ids, r.num_before, r.max_tokens) for r in again.requests] == [
        ((1, 2), 0, 3),
        ((1, 2, 2), 1, 2),
        ((3, 3), 1, 2),
        ((3, 5, 5), 1, 1),
    ]
    assert [r.seed for r in again.requests] == [r.seed for r in engines.requests]
    first, second, _, last = collect(again.wait, groups, timeout_s=1.0).samples
    assert [s.token_ids.tolist() for s in first.segments] == [[1, 2], [2, 1]]
    assert [s.token_ids.tolist() for s in second.segments] == [[1, 2], [2], [2, 2, 1]]
    assert [s.token_ids.tolist() for s in last.segments] == [[3], [5], [5], [5, 5, 3]]
    assert second.finish_reason is FinishReason.LENGTH


def test_finished_samples_are_not_sampled_again() -> None:
    source, engines = VllmSource(first := EchoEngines()), EchoEngines()
    finished = collect(first.wait, begin_groups(source, PROMPTS, PLAN), timeout_s=1.0).samples
    again = VllmSource(engines)
    assert collect(engines.wait, begin_groups(again, PROMPTS, PLAN, begun=finished), timeout_s=1.0).samples == finished
    assert engines.requests == []


def test_nan_from_the_engine_names_step_and_row() -> None:
    source = VllmSource(engines := EchoEngines(logprob=float("nan")))
    groups = begin_groups(source, PROMPTS, PLAN)
    with pytest.raises(NonFiniteError, match="step 4: rollout log-probs of row b/1 are not finite"):
        collect(engines.wait, groups, timeout_s=1.0)


class Told:
    """Takes samples as a judging does."""

    def __init__(self) -> None:
        self.samples: list[tuple[Prompt, Sample]] = []

    def add(self, prompt: Prompt, sample: Sample, response: str | None = None) -> None:
        self.samples.append((prompt, sample))


def test_samples_are_told_of_as_they_finish() -> None:
    source = VllmSource(engines := EchoEngines())
    prefixes = {("a", 1): Prefix(token_ids=(5, 2), is_complete=True)}
    told = Told()
    groups = begin_groups(source, PROMPTS, replace(PLAN, prefixes=prefixes), judging=told)
    # What nobody generates is finished at once.
    assert [(prompt.uid, sample.sample_index) for prompt, sample in told.samples] == [("a", 1)]
    batch = collect(engines.wait, groups, timeout_s=1.0)
    order = [("a", 1), ("b", 1), ("b", 0), ("a", 0)]
    assert [(prompt.uid, sample.sample_index) for prompt, sample in told.samples] == order
    assert {id(sample) for _, sample in told.samples} == {id(sample) for sample in batch.samples}


def test_long_responses_are_decoded_in_another_thread() -> None:
    """The thread of the loop hears engines and hosts meanwhile; judges hear of samples in the order of their ends."""

    class Reading(Told):
        def __init__(self) -> None:
            super().__init__()
            self.threads, self.responses = list[threading.Thread](), list[str | None]()

        def read(self, sample: Sample) -> str:
            self.threads.append(threading.current_thread())
            return f"{sample.uid}/{sample.sample_index}"

        def add(self, prompt: Prompt, sample: Sample, response: str | None = None) -> None:
            super().add(prompt, sample)
            self.responses.append(response)

    reading, source = Reading(), VllmSource(engines := EchoEngines())
    prompts = [replace(PROMPTS[0], token_ids=tuple(range(2000))), PROMPTS[1]]
    collect(engines.wait, begin_groups(source, prompts, PLAN, judging=reading), timeout_s=1.0)
    assert reading.responses == [None, None, "a/1", "a/0"]
    assert len(reading.threads) == 2
    assert threading.current_thread() not in reading.threads


def test_first_requests_share_the_tuple_of_their_prompt() -> None:
    engines = EchoEngines()
    begin_groups(VllmSource(engines), PROMPTS, PLAN)
    assert all(request.token_ids in (PROMPTS[0].token_ids, PROMPTS[1].token_ids) for request in engines.requests)
    assert {id(request.token_ids) for request in engines.requests} == {id(prompt.token_ids) for prompt in PROMPTS}


def test_judges_read_one_sample_in_each_turn_of_the_loop() -> None:
    """Here all samples finish in the same turn."""
    now, read = [0], list[int]()

    async def count() -> None:
        while True:
            now[0] += 1
            await asyncio.sleep(0)

    class Timed(Told):
        def add(self, prompt: Prompt, sample: Sample, response: str | None = None) -> None:
            read.append(now[0])

    loop.spawn(count())
    source = VllmSource(engines := EchoEngines())
    collect(engines.wait, begin_groups(source, PROMPTS, replace(PLAN, num_samples=5), judging=Timed()), timeout_s=1.0)
    assert len(read) == len(set(read)) == 10


class FillingEngines(EchoEngines):
    """Answers each request with as many tokens 8 as it may have."""

    def answer(self, request: GenerationRequest) -> Sequence[int]:
        return [8] * request.max_tokens


def test_a_prefix_is_continued_with_what_is_left_of_the_limit() -> None:
    engines = FillingEngines()
    source = VllmSource(engines)
    groups = begin_groups(
        source, PROMPTS, replace(PLAN, prefixes={("a", 1): Prefix(token_ids=(5, 6)), ("b", 0): Prefix()})
    )
    assert [(r.token_ids, r.max_tokens) for r in engines.requests] == [
        ((1, 2), 3),
        ((1, 2, 5, 6), 1),
        ((3,), 3),
        ((3,), 3),
    ]
    # The seed is that of the sample, with or without a prefix.
    assert engines.requests[1].seed == sample_seed(11, 4, "a", 1)
    samples = collect(engines.wait, groups, timeout_s=1.0).samples
    assert [s.response_token_ids.tolist() for s in samples] == [[8, 8, 8], [5, 6, 8], [8, 8, 8], [8, 8, 8]]
    prompt, demonstration, policy = samples[1].segments
    assert (demonstration.source, policy.source) == (SegmentSource.DEMONSTRATION, SegmentSource.POLICY)
    assert prompt.token_ids.tolist() == [1, 2]
    assert demonstration.loss_mask.tolist() == [True, True]
    assert demonstration.weight_versions.tolist() == [-1, -1]
    assert demonstration.rollout_logprobs is None
    assert policy.weight_versions.tolist() == [9]
    assert samples[1].rollout_logprobs.tolist() == [0.0, 0.0, -0.5]
    assert [s.source for s in samples[2].segments] == [SegmentSource.PROMPT, SegmentSource.POLICY]


def test_what_a_prefix_ends_or_fills_is_not_generated() -> None:
    engines = FillingEngines()
    source = VllmSource(engines)
    prefixes = {
        ("a", 0): Prefix(token_ids=(5, 2), is_complete=True),
        ("a", 1): Prefix(token_ids=(5, 6, 7)),
        # Cut at the limit, it no longer ends.
        ("b", 0): Prefix(token_ids=(5, 6, 7, 2), is_complete=True),
    }
    groups = begin_groups(source, PROMPTS, replace(PLAN, prefixes=prefixes))
    assert [(r.token_ids, r.seed) for r in engines.requests] == [((3,), sample_seed(11, 4, "b", 1))]
    samples = collect(engines.wait, groups, timeout_s=1.0).samples
    assert [s.response_token_ids.tolist() for s in samples] == [[5, 2], [5, 6, 7], [5, 6, 7], [8, 8, 8]]
    assert [s.finish_reason for s in samples] == [FinishReason.STOP] + [FinishReason.LENGTH] * 3
    assert [len(s.segments) for s in samples] == [2, 2, 2, 2]


def test_which_tokens_are_the_prefix_golden() -> None:
    golden = json.loads((Path(__file__).parents[2] / "golden" / "algos.json").read_text(encoding="utf-8"))
    case = next(case for case in golden["cases"] if case["id"] == "E.prefix.mask")
    lengths, limit = case["inputs"]["prefix_len"], case["inputs"]["response_length"]
    prefixes = {("a", i): Prefix(token_ids=(5,) * length) for i, length in enumerate(lengths)}
    source = VllmSource(engines := FillingEngines())
    plan = replace(PLAN, num_samples=len(lengths), max_response_tokens=limit, prefixes=prefixes)
    batch = collect(engines.wait, begin_groups(source, PROMPTS[:1], plan), timeout_s=1.0)
    marks = [demonstration_quantities(s, batch.prompts["a"])["demonstration"].tolist() for s in batch.samples]
    assert marks == case["expected"]
