"""Produce rollouts with vLLM engines."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from megarl.rollout.engine import Completion, GenerationRequest
from megarl.rollout.source import OnSample, SamplingPlan, ignore_sample, require_finite
from megarl.seeds import sample_seed
from megarl.types import FinishReason, Prompt, RolloutBatch, Sample, Segment, SegmentSource, prompt_segment

# Called with each completion and the position of its request.
OnCompletion: TypeAlias = Callable[[int, Completion], None]


class Engines(Protocol):
    """The interface of a group of engines, as `VllmSource` calls it."""

    def submit(self, requests: Sequence[GenerationRequest]) -> Any: ...

    def collect(self, calls: Any, on_finished: OnCompletion, *, timeout_s: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    """A batch that the engines are working on; `asked` has the (prompt, sample index) of each request."""

    prompts: list[Prompt]
    plan: SamplingPlan
    asked: list[tuple[Prompt, int]]
    calls: Any


class VllmSource:
    """A source that samples from vLLM engines. Each sample has a seed of its own, so batching and order do not matter.

    A sample with a prefix starts with it. If the prefix ends the sample or fills its limit, nothing is generated.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._pending: deque[_Submission] = deque()

    def submit(self, prompts: Sequence[Prompt], plan: SamplingPlan) -> None:
        asked = [(p, i) for p in prompts for i in range(plan.num_samples) if plan.num_tokens_left(p.uid, i)]
        requests = [
            GenerationRequest(
                token_ids=prompt.token_ids + plan.prefix(prompt.uid, i).token_ids,
                seed=sample_seed(plan.run_seed, plan.step, prompt.uid, i),
                temperature=0.0 if plan.last_is_greedy and i == plan.num_samples - 1 else plan.temperature,
                top_p=plan.top_p,
                top_k=plan.top_k,
                max_tokens=plan.num_tokens_left(prompt.uid, i),
                stop=plan.stop,
                stop_token_ids=plan.stop_token_ids,
                with_nucleus=plan.with_nucleus,
            )
            for prompt, i in asked
        ]
        calls = self._engines.submit(requests)
        self._pending.append(_Submission(prompts=list(prompts), plan=plan, asked=asked, calls=calls))

    def collect(self, num_groups: int, *, timeout_s: float, on_sample: OnSample = ignore_sample) -> RolloutBatch:
        pending = self._pending.popleft()
        if len(pending.prompts) != num_groups:
            raise ValueError(f"asked for {num_groups} groups, the oldest submission has {len(pending.prompts)}")
        samples: dict[tuple[str, int], Sample] = {}

        def finish(prompt: Prompt, sample_index: int, completion: Completion | None) -> None:
            sample = _sample(prompt, pending.plan, sample_index, completion)
            require_finite([sample], step=pending.plan.step)
            samples[prompt.uid, sample_index] = sample
            on_sample(prompt, sample)

        order = [(p, i) for p in pending.prompts for i in range(pending.plan.num_samples)]
        for prompt, i in order:
            if not pending.plan.num_tokens_left(prompt.uid, i):
                finish(prompt, i, None)
        self._engines.collect(
            pending.calls,
            lambda position, completion: finish(*pending.asked[position], completion),
            timeout_s=timeout_s,
        )
        return RolloutBatch(
            prompts={p.uid: p for p in pending.prompts}, samples=tuple(samples[p.uid, i] for p, i in order)
        )

    def state_dict(self) -> dict[str, Any]:
        # This source is synchronous: no request is pending between steps.
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending.clear()


def _sample(prompt: Prompt, plan: SamplingPlan, sample_index: int, completion: Completion | None) -> Sample:
    """Build a sample from its prefix and, if anything was generated, its completion."""
    prefix = plan.prefix(prompt.uid, sample_index)
    finish_reason = FinishReason.STOP if prefix.is_complete else FinishReason.LENGTH
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
    if completion is not None:
        finish_reason = completion.finish_reason
        segments.append(
            Segment(
                source=SegmentSource.POLICY,
                token_ids=completion.token_ids,
                loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
                weight_versions=completion.weight_versions,
                rollout_logprobs=completion.logprobs,
                nucleus=completion.nucleus,
            )
        )
    return Sample(
        uid=prompt.uid,
        sample_index=sample_index,
        seed=sample_seed(plan.run_seed, plan.step, prompt.uid, sample_index),
        segments=tuple(segments),
        finish_reason=finish_reason,
    )
