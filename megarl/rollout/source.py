"""The seam between the trainer and whatever produces samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from megarl.errors import NonFiniteError
from megarl.rollout.prefixes import Prefix
from megarl.types import Prompt, RolloutBatch, Sample

# Told of each sample, with its prompt, when it is finished: others may still be generated.
OnSample: TypeAlias = Callable[[Prompt, Sample], None]


def ignore_sample(prompt: Prompt, sample: Sample) -> None:
    """An `OnSample` for those who wait for the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How one batch of prompts is sampled. `temperature` 0 means greedy.

    prefixes: what responses start with, by (uid, sample index), as far as they start with anything.
    """

    step: int
    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_response_tokens: int
    run_seed: int
    prefixes: Mapping[tuple[str, int], Prefix] = field(default_factory=dict)

    def prefix(self, uid: str, sample_index: int) -> Prefix:
        """What a response starts with, within its limit; possibly nothing."""
        return self.prefixes.get((uid, sample_index), Prefix()).within(self.max_response_tokens)

    def num_tokens_left(self, uid: str, sample_index: int) -> int:
        """How many tokens a response may get after its prefix; 0 if the prefix is all of it."""
        prefix = self.prefix(uid, sample_index)
        return 0 if prefix.is_complete else self.max_response_tokens - len(prefix.token_ids)


class RolloutSource(Protocol):
    """Synchronous training is submit, then collect with staleness 0; other sources and modes keep the calls."""

    def submit(self, prompts: Sequence[Prompt], plan: SamplingPlan) -> None:
        """Start sampling; returns at once."""

    def collect(self, num_groups: int, *, timeout_s: float, on_sample: OnSample = ignore_sample) -> RolloutBatch:
        """The next `num_groups` finished groups, in submission order; `on_sample` gets each of their samples once."""

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to continue exactly."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


def require_finite(samples: Sequence[Sample], *, step: int) -> None:
    """Raise NonFiniteError naming the first sample whose log-probs are NaN or infinite."""
    for sample in samples:
        if not np.isfinite(sample.rollout_logprobs).all():
            raise NonFiniteError(
                f"step {step}: rollout log-probs of row {sample.uid}/{sample.sample_index} are not finite; "
                f"the engine's weights or the record are spoiled: start from an earlier checkpoint, or record again"
            )
