"""Aggregate per-token losses into the objective: the sum of all micro-batches' local sums, divided by one denominator.

Every micro-batch on every data-parallel rank contributes a local sum. The denominator covers the whole optimizer
mini-batch and is known before the first backward pass. The objective therefore does not depend on how rows are split.
Rows without loss tokens are neither summed nor counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from megarl.algos.masked import masked_sum, row_means
from megarl.config.torch_later import Tensor
from megarl.registry import FunctionRegistry
from megarl.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """The numbers of rows with loss tokens and of loss tokens in an optimizer mini-batch, over all ranks."""

    num_rows: int
    num_tokens: int


def count_rows(rows: Sequence[Row]) -> RowCounts:
    """Count the rows that have at least one loss token, and count all loss tokens.

    >>> count_rows([row([1, 0, 1]), row([0])])
    RowCounts(num_rows=1, num_tokens=2)
    """
    num_tokens = [row.num_loss_tokens for row in rows]
    return RowCounts(num_rows=sum(n > 0 for n in num_tokens), num_tokens=sum(num_tokens))


LocalSum: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """An aggregation reduces per-token losses to a number: the sum of `local_sum` over micro-batches / `denominator`.

    local_sum: (loss [B, T], mask [B, T]) → scalar. denominator: (counts over all ranks, horizon_tokens) → float, 0 for
    an empty mini-batch (see `global_denominator`). uses_horizon: whether `denominator` reads `horizon_tokens`.
    """

    local_sum: LocalSum = field(kw_only=False)
    denominator: Callable[[RowCounts, int], float]
    uses_horizon: bool = False


AGGREGATIONS: FunctionRegistry[LocalSum, Aggregation] = FunctionRegistry(
    "aggregation", key="algo.aggregation", entry=Aggregation, parameters=("loss", "mask")
)


# Σ tokens / number of tokens (DAPO, arXiv:2503.14476): long rows have more weight.
@AGGREGATIONS.register("token-mean", denominator=lambda counts, horizon_tokens: counts.num_tokens)
# Mean over rows of the row's sum.
@AGGREGATIONS.register("seq-mean-token-sum", denominator=lambda counts, horizon_tokens: counts.num_rows)
# Σ tokens / horizon: the scale grows with the number of rows. verl 0.9.1 also divides by rows, as `dr_grpo` does here.
@AGGREGATIONS.register(
    "seq-mean-token-sum-norm", denominator=lambda counts, horizon_tokens: horizon_tokens, uses_horizon=True
)
# Σ tokens / (number of rows × horizon) (Dr. GRPO, arXiv:2503.20783): no length bias, and a scale that does
# not depend on the batch size.
@AGGREGATIONS.register(
    "dr_grpo", denominator=lambda counts, horizon_tokens: counts.num_rows * horizon_tokens, uses_horizon=True
)
def token_sum(loss: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the per-token loss over the loss tokens.

    >>> token_sum(tensor([[1.0, 2.0, 9.0]]), tensor([[True, True, False]])).item()
    3.0
    """
    return masked_sum(loss, mask)


# Mean over rows of the row's mean (GRPO, arXiv:2402.03300): tokens of long rows have less weight.
@AGGREGATIONS.register("seq-mean-token-mean", denominator=lambda counts, horizon_tokens: counts.num_rows)
def row_mean_sum(loss: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over rows of each row's mean loss over its loss tokens.

    >>> row_mean_sum(tensor([[1.0, 2.0, 9.0]]), tensor([[True, True, False]])).item()
    1.5
    """
    return row_means(loss, mask).sum()


def global_denominator(aggregation: Aggregation, counts: RowCounts, *, horizon_tokens: int) -> float:
    """Return the divisor of the local sums: at least 1, so that an empty mini-batch has the loss 0 and not NaN.

    >>> counts = RowCounts(num_rows=2, num_tokens=7)
    >>> global_denominator(AGGREGATIONS.get("dr_grpo"), counts, horizon_tokens=10)
    20.0
    """
    return float(max(aggregation.denominator(counts, horizon_tokens), 1))
