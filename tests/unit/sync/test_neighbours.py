"""Sinks sit where they process_plan most memory, against all permutations; overlaps by hand."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.sync.plan.assign import assignment, best_neighbours, overlaps
from megarl.sync.plan.build import build_plan, plan_statistics
from megarl.weights.safetensors_map import TensorSpec


@given(st.integers(1, 5), st.integers(0, 2), st.data())
def test_no_permutation_costs_less(num_rows: int, more: int, data: st.DataObject) -> None:
    costs = np.array(
        [[data.draw(st.integers(-9, 9)) for _ in range(num_rows + more)] for _ in range(num_rows)], dtype=np.int64
    )
    chosen = assignment(costs)
    assert len(set(chosen)) == num_rows
    all_ways = itertools.permutations(range(num_rows + more), num_rows)
    least = min(sum(int(costs[i, j]) for i, j in enumerate(way)) for way in all_ways)
    assert sum(int(costs[i, j]) for i, j in enumerate(chosen)) == least


def test_four_quarters_to_two_engines() -> None:
    """Quarters of 8 rows of 4 bytes at ranks 0 to 3; workers 10, 12 want the first half, 11, 13 the second."""
    specs = {"a": TensorSpec(shape=(8,), dtype=torch.float32)}
    held = {rank: {"a": (((2 * rank, 2 * rank + 2),),)} for rank in range(4)}
    needed = {10: {"a": (((0, 4),),)}, 11: {"a": (((4, 8),),)}, 12: {"a": (((0, 4),),)}, 13: {"a": (((4, 8),),)}}
    assert overlaps(specs, held, needed).tolist() == [[8, 8, 0, 0], [0, 0, 8, 8]] * 2
    seats = dict(zip(needed, best_neighbours(overlaps(specs, held, needed)), strict=True))
    assert {seats[10], seats[12]} == {0, 1}
    assert {seats[11], seats[13]} == {2, 3}
    best = build_plan(specs, held, needed, neighbours={i: [j] for i, j in seats.items()}, bucket_bytes=100)
    in_order = build_plan(specs, held, needed, neighbours={10 + i: [i] for i in range(4)}, bucket_bytes=100)
    # In order, 11 sits with the second quarter and 12 with the third, of which they need nothing.
    assert [plan_statistics(each).wire_bytes for each in (best, in_order)] == [4 * 8, 2 * 8 + 2 * 16]


def test_more_receivers_than_sources_have_no_place() -> None:
    with pytest.raises(ValueError, match="got 2 receivers and 1 sources"):
        best_neighbours(np.zeros((2, 1), dtype=np.int64))
