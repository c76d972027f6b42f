"""Choose the demonstration tokens that each sample of a step starts with, and mark them in its row."""

from collections.abc import Sequence

import numpy as np

from megarl.algos.prefixes import DEMONSTRATION, TARGET_PROBS, keeps_demonstration, prefix_length, prefix_ratios
from megarl.config.algo import DemonstrationConfig
from megarl.rollout.source import Prefix
from megarl.types import FloatArray, Prompt, Sample, SegmentSource


def plan_prefixes(
    prompts: Sequence[Prompt],
    cfg: DemonstrationConfig,
    *,
    step: int,
    num_samples: int,
    run_seed: int,
    end_token_ids: tuple[int, ...],
) -> dict[tuple[str, int], Prefix]:
    """Choose the prefixes of a step, by (uid, sample index), as a pure function of the arguments; other samples have
    none.

    A demonstration that was cut does not end in `end_token_ids`, so its sample is continued even at ratio 1.
    Raises ConfigError if more samples are to have a prefix than there are.
    """
    prefixes: dict[tuple[str, int], Prefix] = {}
    for prompt in prompts:
        ratios = prefix_ratios(cfg, uid=prompt.uid, step=step, num_samples=num_samples, run_seed=run_seed)
        if not keeps_demonstration(cfg, uid=prompt.uid, run_seed=run_seed):
            continue
        for i, ratio in enumerate(ratios):
            ids = prompt.demonstration_ids[: prefix_length(len(prompt.demonstration_ids), ratio)]
            if ids:
                prefixes[prompt.uid, i] = Prefix(token_ids=ids, is_complete=ids[-len(end_token_ids) :] == end_token_ids)
    return prefixes


def demonstration_quantities(sample: Sample, prompt: Prompt) -> dict[str, FloatArray]:
    """Return the quantities [R] of a sample's row: `demonstration`, 1 on demonstration tokens, and `target_probs`."""
    is_demonstration = np.concatenate(
        [
            np.empty(0, np.bool_),
            *(np.full(len(s.token_ids), s.source is SegmentSource.DEMONSTRATION) for s in sample.segments[1:]),
        ]
    )
    # A demonstration is always the first segment of a response, so the prompt's probabilities align at its start.
    known = prompt.demonstration_probs[: int(is_demonstration.sum())]
    probs = np.full(len(is_demonstration), -1.0, np.float32)
    probs[: len(known)] = known
    return {DEMONSTRATION: is_demonstration.astype(np.float32), TARGET_PROBS: probs}
