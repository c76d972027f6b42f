"""Measure the mismatch between engine and trainer, and stop a run before its first update if it is too large."""

from collections.abc import Sequence

import torch

from megarl.algos.mismatch import MismatchSums, mismatch_sums
from megarl.algos.prefixes import DEMONSTRATION
from megarl.config.schema import Config
from megarl.errors import MismatchError
from megarl.types import FloatArray, Row, Score, pad_rows

# Mean |Δ log-prob| between engine and trainer above which training would optimise a different policy.
MISMATCH_GATE_NATS = {"float32": 1e-4, "bfloat16": 0.05}


def mismatch_of(rows: Sequence[Row], logprobs: Sequence[FloatArray]) -> MismatchSums:
    """Compare the trainer's log-probs [R] of each row with the engine's, on the tokens that the engine sampled."""
    given = [row.scores.get(DEMONSTRATION) for row in rows]
    return mismatch_sums(
        pad_rows([row.scores["rollout_logprobs"] for row in rows], dtype=torch.float32),
        pad_rows(logprobs, dtype=torch.float32),
        pad_rows(
            [row.loss_mask if g is None else row.loss_mask & (g == 0) for row, g in zip(rows, given, strict=True)],
            dtype=torch.bool,
        ),
    )


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
