"""Train a policy on preference pairs: the task of `megarl train-preference`, with the quantities that its losses
read.
"""

from collections.abc import Collection

import numpy as np
import torch

from megarl.algos.preference import BATCH_KL, PreferenceObjective, preference_objective
from megarl.cluster.roles import actor_role, reference_role
from megarl.data.preferences import ResponsePairDataset, mismatched_rows
from megarl.train.forward import with_quantities
from megarl.train.supervised import PassesByRole, SupervisedTask
from megarl.train.supervised_inputs import SupervisedInputs
from megarl.train.validate import Validation
from megarl.types import AlgoState, PolicyOutputs, Row, TokenQuantity, pad_rows, row_batch
from megarl.types.messages import Role


def train_preference_task(inputs: SupervisedInputs[ResponsePairDataset]) -> SupervisedTask:
    """Make the task that trains up to `train_preference.total_steps`, `train_preference.batch_size` pairs a step."""
    config, settings, val = inputs.config, inputs.config.train_preference, inputs.val
    objective = preference_objective(settings)
    return SupervisedTask(
        command="train-preference",
        role=actor_role(config),
        objective=objective,
        total_steps=settings.total_steps,
        batch_size=settings.batch_size,
        num_examples=len(inputs.train),
        rows=inputs.train.rows,
        validate=None if val is None else lambda passes, step: validate_preferences(val, objective, passes, step=step),
        validate_every=settings.val_every_steps,
        frozen=(reference_role(config),) if TokenQuantity.REF_LOGPROBS in objective.reads else (),
        add_quantities=lambda passes, rows, step: with_pair_quantities(rows, objective.reads, passes, step=step),
    )


def with_pair_quantities(rows: list[Row], reads: Collection[str], passes: PassesByRole, *, step: int) -> list[Row]:
    """Return a batch's rows with those quantities of `reads` that need models: reference log-probs, and KTO's batch KL.

    The KL is estimated with the policy as it is before the step, over the whole batch: it has no gradient, and does not
    depend on how the rows are split over ranks and micro-batches.
    """
    if TokenQuantity.REF_LOGPROBS not in reads:
        return rows
    others = mismatched_rows(rows) if BATCH_KL in reads else []
    reference = passes[Role.REFERENCE].forward([*rows, *others], step=step)["logprobs"]
    rows = with_quantities(rows, {TokenQuantity.REF_LOGPROBS: reference[: len(rows)]})
    if not others:
        return rows
    policy = passes[Role.ACTOR].forward(others, step=step)["logprobs"]
    ratios = [(p.astype(np.float64) - r).sum() for p, r in zip(policy, reference[len(rows) :], strict=True)]
    kl = max(float(np.mean(ratios)), 0.0)
    return with_quantities(rows, {BATCH_KL: [np.full(row.num_response_tokens, kl, np.float32) for row in rows]})


def validate_preferences(
    data: ResponsePairDataset, objective: PreferenceObjective, passes: PassesByRole, *, step: int
) -> Validation:
    """Measure the loss and its metrics over held-out pairs; the score is the accuracy.

    KTO's KL is estimated once over all pairs, so that no number depends on how they divide into batches.
    """
    rows = with_pair_quantities(data.rows(range(len(data))), objective.reads, passes, step=step)
    logprobs = passes[Role.ACTOR].forward(rows, step=step)["logprobs"]
    sums: dict[str, float] = {}
    # In parts, because rows are padded to the longest of a part.
    for start in range(0, len(data), objective.cfg.batch_size):
        pairs = range(start, min(start + objective.cfg.batch_size, len(data)))
        both = [*pairs, *(len(data) + i for i in pairs)]
        padded = pad_rows([logprobs[i] for i in both], dtype=torch.float32)
        batch = row_batch([rows[i] for i in both], device=padded.device)
        parts = objective.loss(batch, PolicyOutputs(logprobs=padded, entropy=None), AlgoState())
        for name, value in parts.shares({"pairs": float(len(data))}).items():
            sums[name] = sums.get(name, 0.0) + value
    accuracy, loss = sums["preference/accuracy"], sums["preference/loss"]
    return Validation(
        metrics={**{f"val/{name}": value for name, value in sums.items()}, "val/preference/num_pairs": len(data)},
        score=accuracy,
        summary=f"validation on {len(data)} pairs: accuracy {accuracy:.3f}, loss {loss:.3f}",
    )
