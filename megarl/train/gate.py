"""Measure the mismatch between engine and trainer, and stop a run before its first update if it is too large."""

from collections.abc import Sequence

import torch

from megarl.algos.mismatch import MismatchSums, mismatch_sums
from megarl.algos.prefixes import DEMONSTRATION
from megarl.algos.staleness import LAG, staleness_metrics
from megarl.config.schema import Config
from megarl.errors import MismatchError
from megarl.types import BoolArray, FloatArray, Row, Score, pad_rows

# Mean |Δ log-prob| between engine and trainer above which training would optimise a different policy.
MISMATCH_GATE_NATS = {"float32": 1e-4, "bfloat16": 0.05}


def mismatch_of(rows: Sequence[Row], logprobs: Sequence[FloatArray]) -> MismatchSums:
    """Compare the trainer's log-probs [R] of each row with the engine's, on tokens that the engine sampled from the
    trainer's weights: on stale tokens they differ because of the updates since then.
    """
    return mismatch_sums(
        pad_rows([row.scores["rollout_logprobs"] for row in rows], dtype=torch.float32),
        pad_rows(logprobs, dtype=torch.float32),
        pad_rows([_sampled(row) & (row.scores.get(LAG, 0) == 0) for row in rows], dtype=torch.bool),
    )


def engine_metrics(rows: Sequence[Row], before: Sequence[FloatArray]) -> dict[str, float]:
    """Return how far the engine's log-probs are from the trainer's old ones: mismatch/* on fresh tokens, staleness/* if
    rows know their lags.

    before: the trainer's log-probs of each row from before its first optimizer step, for rows without old log-probs.
    """
    old = [row.scores.get(Score.OLD_LOGPROBS, logprobs) for row, logprobs in zip(rows, before, strict=True)]
    metrics = mismatch_of(rows, old).metrics()
    if LAG in rows[0].scores:
        metrics |= staleness_metrics(
            pad_rows([row.scores[LAG] for row in rows], dtype=torch.float32),
            pad_rows([_sampled(row) for row in rows], dtype=torch.bool),
            rollout_logprobs=pad_rows([row.scores["rollout_logprobs"] for row in rows], dtype=torch.float32),
            old_logprobs=pad_rows(old, dtype=torch.float32),
        )
    return metrics


def _sampled(row: Row) -> BoolArray:
    """Mark the loss tokens that an engine sampled."""
    given = row.scores.get(DEMONSTRATION)
    return row.loss_mask if given is None else row.loss_mask & (given == 0)


class MismatchGate:
    """A check that refuses to train if engine and trainer disagree before the first update."""

    def __init__(self, config: Config) -> None:
        self._limit = config.trainer.mismatch_gate_nats or MISMATCH_GATE_NATS[config.model.dtype]
        self.passed = False

    def check(self, rows: Sequence[Row]) -> None:
        """Compare the rows' old log-probs with the engine's. Raises MismatchError above the limit.

        The first comparison with sampled tokens opens the gate for the rest of the run; later calls do nothing.
        """
        if self.passed:
            return
        sums = mismatch_of(rows, [row.scores[Score.OLD_LOGPROBS] for row in rows])
        measured = sums.metrics()["mismatch/abs_mean"]
        if not measured <= self._limit:
            raise MismatchError(
                f"the engine's log-probs differ from the trainer's by {measured:.2e} nats on average before the first "
                f"update, the limit is {self._limit:.0e} (trainer.mismatch_gate_nats); check that both use the same "
                f"weights, dtype and temperature (sync.verify=true compares every tensor)"
            )
        self.passed = sums.num_tokens > 0
