"""Rollouts from vLLM engines."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import SamplingPlan, require_finite, sample_seed
from megarl.types import Prompt, RolloutBatch, Sample, Segment, SegmentSource, prompt_segment


class Engines(Protocol):
    """What this source needs of a group of engines."""

    def submit(self, requests: Sequence[GenerationRequest]) -> Any: ...

    def collect(self, calls: Any, *, timeout_s: float) -> list[Completion]: ...


class VllmSource:
    """Each sample is its own request with its own seed, so results do not depend on batching or order."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._pending: deque[tuple[list[Prompt], SamplingPlan, Any]] = deque()

    def submit(self, prompts: Sequence[Prompt], plan: SamplingPlan) -> None:
        requests = [_request(prompt, plan, i) for prompt in prompts for i in range(plan.num_samples)]
        self._pending.append((list(prompts), plan, self._engines.submit(requests)))

    def collect(self, num_groups: int, *, timeout_s: float) -> RolloutBatch:
        prompts, plan, calls = self._pending.popleft()
        if len(prompts) != num_groups:
            raise ValueError(f"asked for {num_groups} groups, the oldest submission has {len(prompts)}")
        completions = iter(self._engines.collect(calls, timeout_s=timeout_s))
        samples = tuple(
            _sample(prompt, plan, i, next(completions)) for prompt in prompts for i in range(plan.num_samples)
        )
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
        token_ids=prompt.token_ids,
        seed=sample_seed(plan.run_seed, plan.step, prompt.uid, sample_index),
        temperature=plan.temperature,
        top_p=plan.top_p,
        top_k=plan.top_k,
        max_tokens=plan.max_response_tokens,
    )


def _sample(prompt: Prompt, plan: SamplingPlan, sample_index: int, completion: Completion) -> Sample:
    n = len(completion.token_ids)
    response = Segment(
        source=SegmentSource.POLICY,
        token_ids=completion.token_ids,
        loss_mask=np.ones(n, dtype=np.bool_),
        weight_versions=np.full(n, completion.weight_version, dtype=np.int64),
        rollout_logprobs=completion.logprobs,
    )
    return Sample(
        uid=prompt.uid,
        sample_index=sample_index,
        seed=sample_seed(plan.run_seed, plan.step, prompt.uid, sample_index),
        segments=(prompt_segment(prompt.token_ids), response),
        finish_reason=completion.finish_reason,
    )
