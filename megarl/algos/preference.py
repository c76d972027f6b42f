"""The objective of reward models: the likelihood of preferences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from megarl.types import AlgoState, Denominators, LossSums, Row, RowBatch, ValueOutputs

MARGIN = "margin"


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerry:
    """− log σ(r_chosen − r_rejected − margin), mean over pairs (Bradley and Terry 1952; margins: arXiv:2307.09288).

    Of every batch the first half are the chosen of its pairs and the second half, in the same order, the rejected: a
    pair is never split, as its gradient needs both scores. Each row has one score (`row_read_at_end`); `margin` is a
    score of the chosen rows, 0 in the rejected.
    """

    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({MARGIN})

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """The pairs of an optimizer mini-batch."""
        return {"pairs": max(len(rows) / 2, 1.0)}

    def loss(self, rows: RowBatch, out: ValueOutputs, state: AlgoState) -> LossSums:
        """Sums over the pairs of a micro-batch. Metrics: the share of pairs in order, the mean difference, mean scores.

        Equal scores count as wrong: they prefer nothing.
        """
        num_pairs = len(out.values) // 2
        # Sums over the one place of a row: a micro-batch without rows has none.
        scores, margin = out.values.sum(1), rows.score(MARGIN).sum(1)[:num_pairs]
        chosen, rejected = scores[:num_pairs], scores[num_pairs:]
        difference = chosen - rejected
        with torch.no_grad():
            parts = {
                "accuracy": (difference > 0).float().sum(),
                "margin": difference.sum(),
                "score_chosen": chosen.sum(),
                "score_rejected": rejected.sum(),
            }
        return LossSums(
            objective={"pairs": F.softplus(margin - difference).sum()},
            metrics={"pairs": {f"reward_model/{name}": value for name, value in parts.items()}},
        )
