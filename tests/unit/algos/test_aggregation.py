from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.algos.aggregation import AGGREGATIONS, RowCounts, count_rows, global_denominator
from megarl.types import Row

MakeRows = Callable[[torch.Tensor], list[Row]]
NAMES = list(AGGREGATIONS)


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
