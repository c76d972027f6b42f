"""Which demonstration tokens each sample of a step starts with, and what they mean for its row."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.algos.prefixes import DEMONSTRATION, TARGET_PROBS, keeps_demonstration, prefix_length, prefix_ratios
from megarl.config.algo import DemonstrationConfig
from megarl.types import FloatArray, Prompt, Sample, SegmentSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The first tokens of a response. `is_complete`: the last one ends the response, nothing is left to generate."""

    token_ids: tuple[int, ...] = ()
    is_complete: bool = False

    def within(self, max_tokens: int) -> "Prefix":
        """Itself, or its first `max_tokens` tokens if it is longer."""
        return self if len(self.token_ids) <= max_tokens else Prefix(token_ids=self.token_ids[:max_tokens])


def plan_prefixes(
    prompts: Sequence[Prompt],
    cfg: DemonstrationConfig,
    *,
    step: int,
    num_samples: int,
    run_seed: int,
    eos_token_id: int,
) -> dict[tuple[str, int], Prefix]:
    """The prefixes of a step by (uid, sample index), a function of the arguments alone; samples without one are absent.

    A demonstration that was cut does not end in `eos_token_id`: even with the ratio 1 its sample goes on.
    ConfigError if more samples are to be prefixed than there are.
    """
    prefixes: dict[tuple[str, int], Prefix] = {}
    for prompt in prompts:
        ratios = prefix_ratios(cfg, uid=prompt.uid, step=step, num_samples=num_samples, run_seed=run_seed)
        if not keeps_demonstration(cfg, uid=prompt.uid, run_seed=run_seed):
            continue
        for i, ratio in enumerate(ratios):
            ids = prompt.demonstration_ids[: prefix_length(len(prompt.demonstration_ids), ratio)]
            if ids:
                prefixes[prompt.uid, i] = Prefix(token_ids=ids, is_complete=ids[-1] == eos_token_id)
    return prefixes


def demonstration_scores(sample: Sample, prompt: Prompt) -> dict[str, FloatArray]:
    """Scores [R] of a sample's row: `demonstration`, 1 on demonstration tokens, and `target_probs`."""
    is_demonstration = np.concatenate(
        [
            np.empty(0, np.bool_),
            *(np.full(len(s.token_ids), s.source is SegmentSource.DEMONSTRATION) for s in sample.segments[1:]),
        ]
    )
    # A demonstration is always the first segment of a response, so its tokens are the first of the prompt's.
    known = prompt.demonstration_probs[: int(is_demonstration.sum())]
    probs = np.full(len(is_demonstration), -1.0, np.float32)
    probs[: len(known)] = known
    return {DEMONSTRATION: is_demonstration.astype(np.float32), TARGET_PROBS: probs}
