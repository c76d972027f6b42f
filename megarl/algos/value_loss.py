"""Define the critic's objective: regression of its values on the returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megarl.algos.aggregation import count_rows
from megarl.algos.masked import kept, masked_sum
from megarl.config.torch_later import torch
from megarl.types import AlgoState, Denominators, LossSums, Row, RowBatch, ValueOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """The critic's loss, PPO's: the mean over loss tokens of ½·max((v − R)², (clip(v, v_old ± clip) − R)²). It follows
    the reference code of arXiv:1707.06347. R is the row's quantity `returns`, v_old its `values`; with `clip`
    None, there is no second term and no need for `values`.
    """

    clip: float | None = None

    entropy_needs_grad: ClassVar[bool] = False
    token_local: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"returns", "values"})

    def denominators(self, rows: Sequence[Row]) -> Denominators:
        """Count the loss tokens of an optimizer mini-batch, because the loss is a mean over tokens."""
        return {"tokens": float(max(count_rows(rows).num_tokens, 1))}

    def loss(self, rows: RowBatch, out: ValueOutputs, state: AlgoState) -> LossSums:
        """Sum the loss over a micro-batch; metrics: `critic/{vf_loss,vf_clipfrac,vpred_mean}`."""
        mask = rows.loss_mask
        values, returns = kept(out.values, mask), kept(rows.quantity("returns"), mask)
        error = (values - returns).square()
        clipped = torch.zeros_like(error)
        if self.clip is not None:
            old = kept(rows.quantity("values"), mask)
            near_old = values.clamp(old - self.clip, old + self.clip)
            clipped = (near_old - returns).square()
        loss = masked_sum(0.5 * torch.maximum(error, clipped), mask)
        return LossSums(
            objective={"tokens": loss},
            metrics={
                "tokens": {
                    "critic/vf_loss": loss.detach(),
                    "critic/vf_clipfrac": masked_sum((clipped > error).to(error.dtype), mask),
                    "critic/vpred_mean": values.detach().sum(),
                }
            },
        )
