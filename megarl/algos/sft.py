"""Define supervised fine-tuning as an `Algorithm` without advantages, so that the trainer of RL can run it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

from megarl.algos.aggregation import count_rows
from megarl.algos.corrections import CORRECTION
from megarl.algos.distill import comparison, weighed_divergence
from megarl.algos.masked import kept, masked_sum
from megarl.config.algo import DistillConfig
from megarl.config.torch_later import Tensor
from megarl.types import AlgoState, Denominators, LossSums, PolicyOutputs, Row, RowBatch, ScoredBatch, TokenQuantity


@dataclass(frozen=True, slots=True, kw_only=True)
class SftAlgorithm:
    """An objective for fine-tuning: the mean of −logprobs over loss tokens, the cross-entropy to the data in nats.

    Where rows have the quantity `correction`, it is a weight per token.

    distill: with a teacher, coef times the mean divergence from it on these tokens, instead.
    """

    distill: DistillConfig = field(default_factory=DistillConfig)
    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({CORRECTION})

    def requires(self) -> frozenset[TokenQuantity]:
        return frozenset()

    def initial_state(self) -> AlgoState:
        return AlgoState()

    def advantages(self, batch: ScoredBatch, state: AlgoState) -> NoReturn:
        raise TypeError("supervised fine-tuning has no advantages; update on the rows directly")

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        return {"tokens": float(max(count_rows(rows).num_tokens, 1))}

    def loss(self, rows: RowBatch, out: PolicyOutputs, state: AlgoState) -> LossSums:
        nll = masked_sum(weighted(-out.logprobs, rows), rows.loss_mask)
        metrics = {"sft/nll": nll.detach()}
        if not self.distill.is_dense:
            return LossSums(objective={"tokens": nll}, metrics={"tokens": metrics})
        divergence = masked_sum(weighed_divergence(rows, out, self.distill), rows.loss_mask)
        found = {name: masked_sum(values, rows.loss_mask) for name, values in comparison(out, self.distill).items()}
        metrics |= {"distill/loss": divergence.detach(), **found}
        return LossSums(objective={"tokens": divergence}, metrics={"tokens": metrics})

    def after_step(self, state: AlgoState, metrics: Mapping[str, float], num_rows: int) -> AlgoState:
        return state


def weighted(per_token: Tensor, rows: RowBatch) -> Tensor:
    """Return values [B, T] times the rows' weights per token, if they have any.

    >>> weighted(tensor([[2.0, 3.0]]), rows([[1, 1]], correction=[[0.5, 0.0]])).tolist()
    [[1.0, 0.0]]
    """
    if CORRECTION not in rows.quantities:
        return per_token
    return per_token * kept(rows.quantity(CORRECTION), rows.loss_mask)
