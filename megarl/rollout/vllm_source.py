"""Rollouts from vLLM engines."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import SamplingPlan, require_finite, sample_seed
from megarl.types import FinishReason, Prompt, RolloutBatch, Sample, Segment, SegmentSource, prompt_segment


class Engines(Protocol):
    """What this source needs of a group of engines."""

    def submit(self, requests: Sequence[GenerationRequest]) -> Any: ...

    def collect(self, calls: Any, *, timeout_s: float) -> list[Completion]: ...


class VllmSource:
    """Each sample is its own request with its own seed, so results do not depend on batching or order.

    A sample with a prefix continues it; one that its prefix fills or ends is not generated at all.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._pending: deque[tuple[list[Prompt], SamplingPlan, Any]] = deque()

    def submit(self, prompts: Sequence[Prompt], plan: SamplingPlan) -> None:
        requests = [
            _request(prompt, plan, i)
            for prompt in prompts
            for i in range(plan.num_samples)
            if plan.num_tokens_left(prompt.uid, i)
        ]
        self._pending.append((list(prompts), plan, self._engines.submit(requests)))

    def collect(self, num_groups: int, *, timeout_s: float) -> RolloutBatch:
        prompts, plan, calls = self._pending.popleft()
        if len(prompts) != num_groups:
            raise ValueError(f"asked for {num_groups} groups, the oldest submission has {len(prompts)}")
        completions = iter(self._engines.collect(calls, timeout_s=timeout_s))
        samples = tuple(_sample(prompt, plan, i, completions) for prompt in prompts for i in range(plan.num_samples))
        batch = RolloutBatch(prompts={p.uid: p for p in prompts}, samples=samples)
        require_finite(batch, step=plan.step)
        return batch

    def state_dict(self) -> dict[str, Any]:
        # Synchronous: nothing is in flight between steps.
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending.clear()


def _request(prompt: Prompt, plan: SamplingPlan, sample_index: int) -> GenerationRequest:
    return GenerationRequest(
        token_ids=prompt.token_ids + plan.prefix(prompt.uid, sample_index).token_ids,
        seed=sample_seed(plan.run_seed, plan.step, prompt.uid, sample_index),
        temperature=plan.temperature,
        top_p=plan.top_p,
        top_k=plan.top_k,
        max_tokens=plan.num_tokens_left(prompt.uid, sample_index),
    )


def _sample(prompt: Prompt, plan: SamplingPlan, sample_index: int, completions: Iterator[Completion]) -> Sample:
    """The sample from its prefix and, if it was generated, the next completion."""
    prefix = plan.prefix(prompt.uid, sample_index)
    finish_reason = FinishReason.STOP if prefix.is_complete else FinishReason.LENGTH
    segments = [prompt_segment(prompt.token_ids)]
    if prefix.token_ids:
        segments.append(_demonstration_segment(prefix.token_ids))
    if plan.num_tokens_left(prompt.uid, sample_index):
        completion = next(completions)
        finish_reason = completion.finish_reason
        segments.append(_policy_segment(completion))
    return Sample(
        uid=prompt.uid,
        sample_index=sample_index,
        seed=sample_seed(plan.run_seed, plan.step, prompt.uid, sample_index),
        segments=tuple(segments),
        finish_reason=finish_reason,
    )


def _demonstration_segment(token_ids: Sequence[int]) -> Segment:
    """Trained on like the policy's own tokens, but no engine and no weights chose them."""
    n = len(token_ids)
    return Segment(
        source=SegmentSource.DEMONSTRATION,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        loss_mask=np.ones(n, dtype=np.bool_),
        weight_versions=np.full(n, -1, dtype=np.int64),
    )


def _policy_segment(completion: Completion) -> Segment:
    n = len(completion.token_ids)
    return Segment(
        source=SegmentSource.POLICY,
        token_ids=completion.token_ids,
        loss_mask=np.ones(n, dtype=np.bool_),
        weight_versions=completion.weight_versions,
        rollout_logprobs=completion.logprobs,
    )
