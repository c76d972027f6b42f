"""Define the objective that trains reward models on pairs of a preferred and a rejected response."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from megarl.types import AlgoState, Denominators, LossSums, Row, RowBatch, ValueOutputs

MARGIN = "margin"


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerry:
    """A loss for reward models: the mean of −log σ(r_chosen − r_rejected − margin) over pairs of rows. The source is
    Bradley and Terry (1952), with the margins of arXiv:2307.09288. The first half of a batch are chosen rows, the
    second half the rejected rows of the same pairs. A pair is never split, because its gradient needs both scores.
    Each row has one score r (`row_read_at_end`) and a `margin`, which is 0 in rejected rows.
    """

    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({MARGIN})

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Count the pairs of an optimizer mini-batch."""
        return {"pairs": max(len(rows) / 2, 1.0)}

    def loss(self, rows: RowBatch, out: ValueOutputs, state: AlgoState) -> LossSums:
        """Sum the loss over a micro-batch's pairs. Metrics: share of pairs with r_chosen > r_rejected, mean difference
        and scores. Pairs with equal scores count as wrong.
        """
        num_pairs = len(out.values) // 2
        # Each row has one token; sum(1) also works for a micro-batch without rows, which has none.
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
