"""Training of a reward model on preference pairs, and how it is measured on held-out ones."""

import numpy as np

from megarl.algos.preference import MARGIN, BradleyTerry
from megarl.cluster.roles import reward_role
from megarl.data.preferences import PreferenceDataset
from megarl.train.inputs import TrainRewardInputs
from megarl.train.supervised import SupervisedTask
from megarl.train.update import RoleScorer
from megarl.train.validate import Validation
from megarl.types import FloatArray


def train_reward_task(inputs: TrainRewardInputs) -> SupervisedTask:
    """Training up to step `train_reward.total_steps`, on `train_reward.batch_size` pairs a step."""
    settings, val = inputs.config.train_reward, inputs.val
    return SupervisedTask(
        command="train-reward",
        role=reward_role(inputs.config),
        objective=BradleyTerry(),
        total_steps=settings.total_steps,
        batch_size=settings.batch_size,
        num_examples=len(inputs.train),
        rows=inputs.train.rows,
        paired=True,
        validate=None if val is None else lambda scorer, step: validate_pairs(val, scorer, step=step),
        validate_every=settings.val_every_steps,
    )


def validate_pairs(data: PreferenceDataset, scorer: RoleScorer, *, step: int) -> Validation:
    """Accuracy, loss and mean difference over held-out pairs; the score is the accuracy."""
    rows = data.rows(range(len(data)))
    scores = np.concatenate(scorer.score(rows, step=step)["values"])
    margins = np.concatenate([row.scores[MARGIN] for row in rows[: len(data)]])
    metrics = pair_metrics(scores[: len(data)], scores[len(data) :], margins)
    named = {f"val/reward_model/{name}": value for name, value in metrics.items()}
    return Validation(
        metrics={**named, "val/reward_model/num_pairs": len(data)},
        score=metrics["accuracy"],
        summary=f"validation on {len(data)} pairs: accuracy {metrics['accuracy']:.3f}, loss {metrics['loss']:.3f}",
    )


def pair_metrics(chosen: FloatArray, rejected: FloatArray, margins: FloatArray) -> dict[str, float]:
    """Means over pairs, as of `BradleyTerry`: share in order, difference, loss."""
    difference = chosen.astype(np.float64) - rejected
    return {
        "accuracy": float((difference > 0).mean()),
        "margin": float(difference.mean()),
        # log(1 + exp(x)) that does not overflow.
        "loss": float(np.logaddexp(0.0, margins - difference).mean()),
    }
