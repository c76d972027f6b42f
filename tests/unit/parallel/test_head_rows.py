"""Which kept rows belong to whom, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.parallel.head.rows import RowOwners, overlaps


def group_of(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def owners(counts: tuple[int, ...] | None, rank: int = 0, size: int = 4) -> RowOwners:
    return RowOwners(group=group_of(rank, size), counts=counts)


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        # Ranks 0 to 3 own rows 0-2, none, 3-7 and 8.
        (0, 9, [(0, 0, 3), (2, 3, 8), (3, 8, 9)]),
        (0, 3, [(0, 0, 3)]),
        (0, 4, [(0, 0, 3), (2, 3, 4)]),
        (2, 1, [(0, 0, 1)]),
        (2, 2, [(0, 0, 1), (2, 1, 2)]),
        (3, 5, [(2, 0, 5)]),
        (4, 3, [(2, 0, 3)]),
        (7, 2, [(2, 0, 1), (3, 1, 2)]),
        (8, 1, [(3, 0, 1)]),
        (5, 0, []),
    ],
)
def test_owners_of_a_chunk(start: int, length: int, expected: list[tuple[int, int, int]]) -> None:
    assert list(overlaps((3, 0, 5, 1), start, length)) == expected


@pytest.mark.parametrize(("counts", "owner"), [((0, 4), 1), ((4, 0), 0)])
def test_all_rows_on_one_rank(counts: tuple[int, int], owner: int) -> None:
    got = [list(overlaps(counts, start, 1)) for start in range(4)]
    assert got == [[(owner, 0, 1)]] * 4


def test_own_rows() -> None:
    rows = torch.arange(9)
    got = [owners((3, 0, 5, 1), rank=rank).own(rows).tolist() for rank in range(4)]
    assert got == [[0, 1, 2], [], [3, 4, 5, 6, 7], [8]]
    assert owners(None, rank=2).own(rows) is rows
    # Two ranks by turns.
    got = [owners((3, 0, 5, 1), rank=rank, size=2).own(rows).tolist() for rank in range(2)]
    assert got == [[0, 1, 2, 3, 4, 5, 6, 7], [8]]


def test_rows_that_all_ranks_have_are_not_gathered() -> None:
    rows = torch.randn(3, 2)
    assert owners(None).gather(rows) is rows
    assert owners((3,), size=1).gather(rows) is rows


def test_nothing_to_reduce() -> None:
    """On one rank, and without rows."""
    assert owners((3,), size=1).start_reduction(torch.randn(3, 2), 0) == []
    assert owners(None).start_reduction(torch.randn(0, 2), 0) == []
