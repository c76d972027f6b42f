import pytest
import torch

from megarl.algos.objectives import ValueLoss
from megarl.types import AlgoState, RowBatch, ValueOutputs
from tests.helpers.rows import random_rows


def batch(**quantities: list[float]) -> RowBatch:
    return RowBatch(
        labels=("a",),
        loss_mask=torch.tensor([[True, True, True, False]]),
        quantities={name: torch.tensor([values]) for name, values in quantities.items()},
    )


def test_plain_regression() -> None:
    # ½(1−0)² + ½(2−4)² + ½(3−3)² = 0.5 + 2 + 0; the masked token does not count. dl/dv = v − R.
    values = torch.tensor([[1.0, 2.0, 3.0, 9.0]], requires_grad=True)
    sums = ValueLoss().loss(batch(returns=[0.0, 4.0, 3.0, 0.0]), ValueOutputs(values=values), AlgoState())
    assert sums.objective["tokens"].item() == pytest.approx(2.5)
    sums.objective["tokens"].backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == [1.0, -2.0, 0.0, 0.0]
    assert sums.metrics["tokens"]["critic/vpred_mean"].item() == pytest.approx(6.0)
    assert sums.metrics["tokens"]["critic/vf_clipfrac"].item() == 0


def test_clipped_values() -> None:
    # clip 0.5 around v_old = 0. Token 1: v = 1 → 0.5, R = 2: (1−2)² = 1 < (0.5−2)² = 2.25, clipped, no gradient.
    # Token 2: v = −1 → −0.5, R = 2: (−3)² = 9 > 6.25, unclipped, gradient −3. Token 3: inside the range.
    values = torch.tensor([[1.0, -1.0, 0.25, 0.0]], requires_grad=True)
    rows = batch(returns=[2.0, 2.0, 0.0, 0.0], values=[0.0, 0.0, 0.0, 0.0])
    sums = ValueLoss(clip=0.5).loss(rows, ValueOutputs(values=values), AlgoState())
    assert sums.objective["tokens"].item() == pytest.approx((2.25 + 9 + 0.0625) / 2)
    sums.objective["tokens"].backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([0.0, -3.0, 0.25, 0.0])
    assert sums.metrics["tokens"]["critic/vf_clipfrac"].item() == 1


def test_the_loss_is_a_mean_over_tokens() -> None:
    rows = random_rows([(2, 3), (1, 5)], holes=False)
    assert ValueLoss().denominators(rows) == {"tokens": 8.0}
    # Nothing to learn from is 0 / 1.
    assert ValueLoss().denominators([]) == {"tokens": 1.0}


def test_clipping_needs_the_old_values() -> None:
    out = ValueOutputs(values=torch.zeros(1, 4))
    with pytest.raises(KeyError, match="values was not computed"):
        ValueLoss(clip=0.5).loss(batch(returns=[0.0] * 4), out, AlgoState())
