"""Produce rollouts with vLLM engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from megarl.config.environments import EnvironmentConfig
from megarl.rollout.conversations import Conversation, Conversations, Episodes
from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import Batch, Doing, OnSample, SamplingPlan, generating, ignore_sample
from megarl.seeds import sample_seed
from megarl.types import FinishReason, Prompt, Sample, Segment, SegmentSource, prompt_segment

# Called with each completion and the position of its request.
OnCompletion: TypeAlias = Callable[[int, Completion], None]


class Engines(Protocol):
    """The interface of a group of engines, as `VllmSource` calls it."""

    def submit(self, requests: Sequence[GenerationRequest], tell: OnCompletion) -> None: ...

    def wait(self, until: Callable[[], bool], *, timeout_s: float, doing: Doing) -> None: ...

    def poll(self) -> None: ...

    def unfinished(self) -> list[tuple[OnCompletion, int, Completion]]: ...


class VllmSource:
    """A source that samples from vLLM engines. Each sample has a seed of its own, so batching and order do not matter.

    A sample with a prefix starts with it. If the prefix ends the sample or fills its limit, nothing is generated.
    episodes: hosts of the environments that prompts name; None: every sample is one answer. limits: of conversations.
    """

    def __init__(
        self, engines: Engines, episodes: Episodes | None = None, limits: EnvironmentConfig | None = None
    ) -> None:
        self._engines = engines
        self._conversations: Conversations | None = None
        if episodes is not None and limits is not None:
            self._conversations = Conversations(
                episodes, self._ask_turn, max_turns=limits.max_turns, max_turn_tokens=limits.max_turn_tokens
            )

    def submit(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        on_sample: OnSample = ignore_sample,
        begun: Sequence[Sample] = (),
    ) -> Batch:
        batch = Batch(prompts=list(prompts), plan=plan, on_sample=on_sample)
        earlier = {(sample.uid, sample.sample_index): sample for sample in begun}
        asked = _Asked(deliver=batch.finish)
        requests = []
        for prompt, i in [(p, i) for p in prompts for i in range(plan.num_samples)]:
            known = earlier.get((prompt.uid, i))
            sample = known or _begin(prompt, plan, i)
            if prompt.environment and (known is None or known.finish_reason is FinishReason.ABORT):
                assert self._conversations is not None, "hosts were started for prompts with environments"
                self._conversations.begin(batch, prompt, sample)
            elif sample.finish_reason is not FinishReason.ABORT:
                batch.finish(prompt, sample)
            else:
                asked.samples.append((prompt, sample))
                left = plan.max_response_tokens - len(sample.response_token_ids)
                requests.append(_request(sample, plan, max_tokens=left))
        if requests:
            self._engines.submit(requests, asked)
        return batch

    def _ask_turn(self, talk: Conversation, max_tokens: int) -> None:
        assert self._conversations is not None, "they ask"
        ended = partial(self._conversations.turn_ended, talk)

        def deliver(_: Prompt, sample: Sample) -> None:
            ended(sample)

        asked = _Asked(deliver=deliver, samples=[(talk.prompt, talk.sample)], talk=talk)
        request = _request(talk.sample, talk.batch.plan, max_tokens=max_tokens)
        self._engines.submit([replace(request, engine=talk.engine)], asked)

    def wait(self, until: Callable[[], bool], *, timeout_s: float, doing: Doing = generating) -> None:
        self._engines.wait(until, timeout_s=timeout_s, doing=doing)

    def poll(self) -> None:
        self._engines.poll()

    def unfinished(self) -> list[Sample]:
        parts = [
            tell.extended(position, completion)
            for tell, position, completion in self._engines.unfinished()
            if isinstance(tell, _Asked)
        ]
        if self._conversations is not None:
            sent = {(sample.uid, sample.sample_index) for sample in parts}
            talks = self._conversations.unfinished()
            parts += [s for s in talks if len(s.segments) > 1 and (s.uid, s.sample_index) not in sent]
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The samples that engines generate, new or continued, each with its prompt, in the order of their requests.

    deliver: called with each that has its tokens. talk: the conversation that a single sample belongs to.
    """

    deliver: OnSample
    samples: list[tuple[Prompt, Sample]] = field(default_factory=list)
    talk: Conversation | None = None

    def __call__(self, position: int, completion: Completion) -> None:
        if self.talk is not None:
            self.talk.engine = completion.engine
        self.deliver(self.samples[position][0], self.extended(position, completion))

    def extended(self, position: int, completion: Completion) -> Sample:
        """Return the sample with the tokens of a completion of its request; each request has a segment of its own."""
        sample = self.samples[position][1]
        segment = Segment(
            source=SegmentSource.POLICY,
            token_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
            weight_versions=completion.weight_versions,
            rollout_logprobs=completion.logprobs,
            nucleus=completion.nucleus,
        )
        experts = completion.routed_experts
        if experts is not None:
            # No engine has computed the last token.
            num_tokens = sum(len(each.token_ids) for each in sample.segments) + len(completion.token_ids)
            experts = np.pad(experts, ((0, num_tokens - len(experts)), (0, 0), (0, 0)), constant_values=-1)
        return replace(
            sample,
            segments=(*sample.segments, segment),
            finish_reason=completion.finish_reason,
            routed_experts=experts,
        )


def _request(sample: Sample, plan: SamplingPlan, *, max_tokens: int) -> GenerationRequest:
    """Return the request that goes on with a sample."""
    is_greedy = plan.last_is_greedy and sample.sample_index == plan.num_samples - 1
    return GenerationRequest(
        token_ids=(*sample.prompt_token_ids.tolist(), *sample.response_token_ids.tolist()),
        seed=sample.seed,
        temperature=0.0 if is_greedy else plan.temperature,
        top_p=plan.top_p,
        top_k=plan.top_k,
        max_tokens=max_tokens,
        stop=plan.stop,
        stop_token_ids=plan.stop_token_ids,
        num_before=sum(len(s.token_ids) for s in sample.segments if s.source is SegmentSource.POLICY),
        with_nucleus=plan.with_nucleus,
    )


def _begin(prompt: Prompt, plan: SamplingPlan, sample_index: int) -> Sample:
    """Return a sample of which nothing was generated; it is finished if its prefix ends it or fills its limit."""
    prefix = plan.prefix(prompt.uid, sample_index)
    segments = [prompt_segment(prompt.token_ids)]
    if prefix.token_ids:
        # These tokens are trained on like the policy's own, but no engine sampled them: they have no weight version.
        n = len(prefix.token_ids)
        segments.append(
            Segment(
                source=SegmentSource.DEMONSTRATION,
                token_ids=np.asarray(prefix.token_ids, dtype=np.int64),
                loss_mask=np.ones(n, dtype=np.bool_),
                weight_versions=np.full(n, -1, dtype=np.int64),
            )
        )
    reason = FinishReason.STOP if prefix.is_complete else FinishReason.LENGTH
    return Sample(
        uid=prompt.uid,
        sample_index=sample_index,
        seed=sample_seed(plan.run_seed, plan.step, prompt.uid, sample_index),
        segments=tuple(segments),
        finish_reason=FinishReason.ABORT if plan.num_tokens_left(prompt.uid, sample_index) else reason,
    )
