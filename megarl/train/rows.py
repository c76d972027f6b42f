"""Turn collected samples into training rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.algos.centering import with_head
from megarl.algos.cpo import DIFFICULTY
from megarl.algos.mixed_groups import unneeded_demonstrations
from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.algos.token_rewards import TURN_REWARDS
from megarl.config.algo import AlgoConfig
from megarl.errors import DataError
from megarl.rollout.turns import turn_quantities
from megarl.train.collect import Collected
from megarl.train.prefixes import demonstration_quantities
from megarl.types import FinishReason, Prompt, Reward, Row, SegmentSource, row_from_sample, scored_batch
from megarl.types.rows import LAG, OBSERVED
from megarl.weights.families import Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """The rows of a step with their rewards, and the reason why each sample ended."""

    rows: list[Row]
    rewards: Sequence[Reward]
    finish_reasons: Sequence[FinishReason]


def require_routed_experts(rows: Sequence[Row], dims: Dims) -> None:
    """Raise a DataError unless every row recorded experts of this model (`actor.moe.replay_routing`)."""
    assert dims.experts is not None, "only a model with experts can replay routing"
    num_experts, expected = dims.experts.num, (dims.num_layers, dims.experts.per_token)
    for row in rows:
        experts = row.routed_experts
        if experts is None:
            raise DataError(
                f"row {row.label}: its rollout recorded no experts to replay; replay a record that has them, or set "
                f"actor.moe.replay_routing=false"
            )
        if experts.shape[1:] != expected or experts.max(initial=-1) >= num_experts:
            raise DataError(
                f"row {row.label}: its rollout recorded experts of another model: got (layers, experts per token) = "
                f"{experts.shape[1:]} and expert {experts.max(initial=-1)}, expected {expected} and at most "
                f"{num_experts - 1}; replay a record of this model"
            )


def stated_difficulty(prompt: Prompt, field: str | None) -> np.float32:
    """Return a number from a field of the prompt's `extra_info`; its sign tells hard (−), medium (0) or easy (+).

    Raises DataError if the field is missing or not a finite number.
    """
    value = prompt.extra_info.get(field or "")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        fields = ", ".join(sorted(prompt.extra_info)) or "none"
        raise DataError(
            f"prompt {prompt.uid}: extra_info.{field} is {value!r}, expected a number whose sign says how easy it is; "
            f"its fields are: {fields}; mend the data, or set algo.cpo.difficulty=three_way"
        )
    return np.float32(value)


def training_rows(
    collected: Collected, cfg: AlgoConfig, *, stale_at: int | None = None, replayed: Dims | None = None
) -> TrainingRows:
    """Make one row per sample, and mark the tokens that come from a demonstration.

    stale_at: the step that trains on the rows if samples may be stale; they then know the lag of each token.
    Samples are left out if their group does not need its demonstration (`algo.demonstrations.max_group_accuracy`).
    replayed: the model whose expert routing is replayed, or None; DataError for rows that recorded no experts of this
    model.
    """
    samples, rewards, prompts = collected.rollout.samples, collected.rewards, collected.rollout.prompts
    # All rows of a batch have the same quantities.
    has_episodes, has_forks = any(each.episode is not None for each in samples), any(each.forks for each in samples)
    rows = []
    for sample in samples:
        row = row_from_sample(sample)
        if stale_at is not None:
            spans = [span for segment in sample.segments[1:] for span in segment.versions]
            # Tokens of a demonstration or an environment, of version -1, are not stale.
            lags = np.array([0 if span.version < 0 else stale_at - 1 - span.version for span in spans], np.float32)
            counts = np.array([span.num_tokens for span in spans], np.int64)
            row = row.with_quantities(**{LAG: np.repeat(lags, counts)})
        if has_episodes:
            row = row.with_quantities(**{TURN_REWARDS: sample.turn_rewards})
        if cfg.echo_coef:
            replies = (s for s in sample.segments if s.source is SegmentSource.ENVIRONMENT and len(s.token_ids))
            if any(each.observed is None for each in replies):
                raise DataError(
                    f"row {row.label}: was sampled without algo.echo_coef, so that nobody knows which tokens are the "
                    "environment's own text; sample it again, or set algo.echo_coef=0"
                )
            row = row.with_quantities(**{OBSERVED: sample.observed})
        if has_forks:
            row = row.with_quantities(**turn_quantities(sample))
        measure = POLICY_LOSSES.get(cfg.policy_loss.name).measure
        if measure is not None and cfg.policy_loss.compared_with == "engine":
            row = with_head(row, keeps_sampled=measure(cfg.policy_loss).keeps_sampled)
        if cfg.demonstrations.strategy != "none":
            row = row.with_quantities(**demonstration_quantities(sample, prompts[sample.uid]))
        if cfg.cpo.difficulty == "data":
            difficulty = stated_difficulty(prompts[sample.uid], cfg.cpo.difficulty_field)
            row = row.with_quantities(**{DIFFICULTY: np.full(row.num_response_tokens, difficulty)})
        rows.append(row)
    kept, bound = list(range(len(rows))), cfg.demonstrations.max_group_accuracy
    if cfg.demonstrations.strategy != "none" and bound is not None and rows:
        unneeded = unneeded_demonstrations(scored_batch(rows, rewards), bound).tolist()
        kept = [i for i, out in enumerate(unneeded) if not out]
    if replayed is not None:
        # No engine has read a sample that is a whole demonstration; its tokens are routed by the trainer's routers.
        read = [i for i in kept if any(s.source is SegmentSource.POLICY for s in samples[i].segments)]
        require_routed_experts([rows[i] for i in read], replayed)
    return TrainingRows(
        rows=[rows[i] for i in kept],
        rewards=[rewards[i] for i in kept],
        finish_reasons=[samples[i].finish_reason for i in kept],
    )
