"""Define the interface between the trainer and whatever produces samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from megarl.errors import NonFiniteError
from megarl.rollout.prefixes import Prefix
from megarl.types import Prompt, RolloutBatch, Sample

# Called with each sample and its prompt as soon as it is finished, while others may still be generated.
OnSample: TypeAlias = Callable[[Prompt, Sample], None]
# Says in messages what a wait is for.
Doing: TypeAlias = Callable[[], str]


def generating() -> str:
    """Describe a wait for samples of which nothing more is known."""
    return "generating"


def ignore_sample(prompt: Prompt, sample: Sample) -> None:
    """Do nothing; this is the `OnSample` for callers that only want the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How one batch of prompts is sampled; `temperature` 0 means greedy.

    prefixes: the given first tokens of responses, by (uid, sample index). stop, stop_token_ids: texts and tokens that
    end a response, which includes them. last_is_greedy: whether the last sample of each
    prompt is greedy, whatever `temperature` is. with_nucleus: record the tokens that top_k and top_p left to sample
    each token from.
    """

    step: int
    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_response_tokens: int
    run_seed: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    prefixes: Mapping[tuple[str, int], Prefix] = field(default_factory=dict)
    last_is_greedy: bool = False
    with_nucleus: bool = False

    def prefix(self, uid: str, sample_index: int) -> Prefix:
        """Return the prefix that a response starts with, cut to the response limit; it may be empty."""
        return self.prefixes.get((uid, sample_index), Prefix()).within(self.max_response_tokens)

    def num_tokens_left(self, uid: str, sample_index: int) -> int:
        """Return how many tokens may be generated after a response's prefix; 0 if the prefix is complete."""
        prefix = self.prefix(uid, sample_index)
        return 0 if prefix.is_complete else self.max_response_tokens - len(prefix.token_ids)


@dataclass(slots=True, kw_only=True)
class Batch:
    """Prompts that a source was asked to sample, and the samples that have finished, by (uid, sample index).

    on_sample: called with each sample when it finishes.
    """

    prompts: Sequence[Prompt]
    plan: SamplingPlan
    on_sample: OnSample = ignore_sample
    samples: dict[tuple[str, int], Sample] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.samples) == len(self.prompts) * self.plan.num_samples

    def finish(self, prompt: Prompt, sample: Sample) -> None:
        """Accept a finished sample of a prompt."""
        require_finite([sample], step=self.plan.step)
        self.samples[sample.uid, sample.sample_index] = sample
        self.on_sample(prompt, sample)

    def rollout(self) -> RolloutBatch:
        """Return the samples in the order of the prompts; all must have finished."""
        order = [(p.uid, i) for p in self.prompts for i in range(self.plan.num_samples)]
        return RolloutBatch(prompts={p.uid: p for p in self.prompts}, samples=tuple(self.samples[key] for key in order))


class RolloutSource(Protocol):
    """A source of samples, which takes prompts at any time. It passes samples on only while it is asked to."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        plan: SamplingPlan,
        on_sample: OnSample = ignore_sample,
        begun: Sequence[Sample] = (),
    ) -> Batch:
        """Start sampling, and return at once. begun: samples of these prompts that go on or have finished already."""

    def wait(self, until: Callable[[], bool], *, timeout_s: float, doing: Doing = generating) -> None:
        """Pass finished samples on until `until()`; `timeout_s` limits the time in which none finishes."""

    def poll(self) -> None:
        """Pass samples on that have finished, without waiting."""

    def unfinished(self) -> list[Sample]:
        """Return the samples under way with the tokens so far, if any; their finish reason is `ABORT`. They go on."""


def collect(source: RolloutSource, batch: Batch, *, timeout_s: float) -> RolloutBatch:
    """Wait until all samples of a batch have finished, and return them."""
    total = len(batch.prompts) * batch.plan.num_samples

    def doing() -> str:
        return f"generating: {len(batch.samples)} of {total} samples finished"

    source.wait(lambda: batch.is_complete, timeout_s=timeout_s, doing=doing)
    return batch.rollout()


def require_finite(samples: Sequence[Sample], *, step: int) -> None:
    """Raise NonFiniteError naming the first sample whose log-probs are NaN or infinite."""
    for sample in samples:
        if not np.isfinite(sample.rollout_logprobs).all():
            raise NonFiniteError(
                f"step {step}: rollout log-probs of row {sample.uid}/{sample.sample_index} are not finite; "
                f"the engine's weights or the record are spoiled: start from an earlier checkpoint, or record again"
            )
