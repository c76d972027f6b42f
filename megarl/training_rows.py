"""From collected samples to the rows that train."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.algos.mixed_groups import unneeded_demonstrations
from megarl.collection import Collected
from megarl.config.algo import AlgoConfig
from megarl.rollout.prefixes import demonstration_scores
from megarl.types import FinishReason, Reward, Row, row_from_sample, scored_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Rows with their rewards, and why each sample ended."""

    rows: list[Row]
    rewards: Sequence[Reward]
    finish_reasons: Sequence[FinishReason]


def training_rows(collected: Collected, cfg: AlgoConfig) -> TrainingRows:
    """A row of every sample; with demonstrations rows say which tokens these are.

    Without the samples whose group does not need its demonstration (`algo.demonstrations.max_group_accuracy`).
    """
    samples, rewards = collected.rollout.samples, collected.rewards
    rows = [row_from_sample(sample) for sample in samples]
    kept = list(range(len(rows)))
    if cfg.demonstrations.strategy != "none":
        prompts = collected.rollout.prompts
        rows = [
            row.with_scores(**demonstration_scores(sample, prompts[sample.uid]))
            for row, sample in zip(rows, samples, strict=True)
        ]
        bound = cfg.demonstrations.max_group_accuracy
        if bound is not None and rows:
            unneeded = unneeded_demonstrations(scored_batch(rows, rewards), bound).tolist()
            kept = [i for i, out in enumerate(unneeded) if not out]
    return TrainingRows(
        rows=[rows[i] for i in kept],
        rewards=[rewards[i] for i in kept],
        finish_reasons=[samples[i].finish_reason for i in kept],
    )
