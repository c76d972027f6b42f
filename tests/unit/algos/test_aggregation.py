from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.aggregation import AGGREGATIONS, RowCounts, count_rows, global_denominator
from megarl.types import Row

MakeRows = Callable[[torch.Tensor], list[Row]]
NAMES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "dr_grpo"]


def objective(name: str, loss: torch.Tensor, mask: torch.Tensor, counts: RowCounts, horizon: int) -> torch.Tensor:
    aggregation = AGGREGATIONS.get(name)
    return aggregation.local_sum(loss, mask) / global_denominator(aggregation, counts, horizon_tokens=horizon)


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str, golden: Any, check_golden: Any, make_rows: MakeRows) -> None:
    case = golden("C.loss_agg")
    loss = torch.tensor(case["inputs"]["loss"], dtype=torch.float64)
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    got = objective(name, loss, mask, count_rows(make_rows(mask)), case["params"]["horizon"])
    check_golden(got, case["expected"][name], case)


def test_every_aggregation_is_covered() -> None:
    assert sorted(NAMES) == list(AGGREGATIONS)


def test_rows_without_loss_tokens_are_not_counted(make_rows: MakeRows) -> None:
    mask = torch.tensor([[True, False, True], [False, False, False], [True, False, False]])
    assert count_rows(make_rows(mask)) == RowCounts(num_rows=2, num_tokens=3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (3, 4)])
def test_no_loss_tokens_gives_zero_loss_and_gradient(name: str, shape: tuple[int, int], make_rows: MakeRows) -> None:
    loss = torch.ones(shape, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    value = objective(name, loss, mask, count_rows(make_rows(mask)), 4)
    value.backward()
    assert value.item() == 0.0
    assert loss.grad is not None
    assert not loss.grad.any()


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    seed=st.integers(0, 2**31),
    name=st.sampled_from(NAMES),
)
def test_value_and_gradient_do_not_depend_on_the_split(
    make_rows: MakeRows, lengths: list[int], cut: int, seed: int, name: str
) -> None:
    mask = torch.arange(6)[None, :] < torch.tensor(lengths)[:, None]
    values = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    counts = count_rows(make_rows(mask))

    whole = values.clone().requires_grad_()
    total = objective(name, whole, mask, counts, 6)
    total.backward()

    parts = values.clone().requires_grad_()
    split = torch.zeros((), dtype=torch.float64)
    for rows in (slice(None, cut), slice(cut, None)):
        # Each micro-batch is padded to its own longest row.
        width = max(lengths[rows], default=0)
        piece = objective(name, parts[rows, :width], mask[rows, :width], counts, 6)
        piece.backward()
        split = split + piece.detach()

    torch.testing.assert_close(split, total.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-12)
