"""Define the interface between the trainer and whatever produces samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from megarl.errors import NonFiniteError
from megarl.rollout.prefixes import Prefix
from megarl.types import Prompt, RolloutBatch, Sample

# Called with each sample and its prompt as soon as it is finished, while others may still be generated.
OnSample: TypeAlias = Callable[[Prompt, Sample], None]


def ignore_sample(prompt: Prompt, sample: Sample) -> None:
    """Do nothing; this is the `OnSample` for callers that only want the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How one batch of prompts is sampled; `temperature` 0 means greedy.

    prefixes: the given first tokens of responses, by (uid, sample index). stop, stop_token_ids: texts and tokens that
    end a response besides the eos token; the response includes them. last_is_greedy: whether the last sample of each
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


class RolloutSource(Protocol):
    """A source of samples. The trainer submits a batch and then collects it (training is synchronous: staleness 0)."""

    def submit(self, prompts: Sequence[Prompt], plan: SamplingPlan) -> None:
        """Start sampling, and return at once."""

    def collect(self, num_groups: int, *, timeout_s: float, on_sample: OnSample = ignore_sample) -> RolloutBatch:
        """Return the next `num_groups` finished groups in submission order; call `on_sample` once for each sample."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must be saved to continue exactly."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def require_finite(samples: Sequence[Sample], *, step: int) -> None:
    """Raise NonFiniteError naming the first sample whose log-probs are NaN or infinite."""
    for sample in samples:
        if not np.isfinite(sample.rollout_logprobs).all():
            raise NonFiniteError(
                f"step {step}: rollout log-probs of row {sample.uid}/{sample.sample_index} are not finite; "
                f"the engine's weights or the record are spoiled: start from an earlier checkpoint, or record again"
            )
