"""Prefixes that rows share: orders and counts worked out by hand, and against every pair."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.types import Row
from megarl.types.forks import Fork
from megarl.types.prefixes import count_shared, counted_once, family_order, held_prefixes


def make_row(*tokens: int, experts: list[int] | None = None) -> Row:
    row = Row(
        uid="q",
        sample_index=0,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=1,
        loss_mask=np.ones(len(tokens) - 1, np.bool_),
    )
    return row if experts is None else replace(row, routed_experts=np.array(experts, np.int16)[:, None, None])


def test_tokens_and_their_recorded_experts_are_shared() -> None:
    assert count_shared(make_row(1, 2, 3, 4), make_row(1, 2, 5)) == 2
    assert count_shared(make_row(1, 2), make_row(1, 2, 5)) == 2
    assert count_shared(make_row(1), make_row(2)) == 0
    routed = make_row(1, 2, 3, experts=[7, 8, -1])
    assert count_shared(routed, make_row(1, 2, 3, 4, experts=[7, 8, 9, -1])) == 2
    assert count_shared(routed, make_row(1, 2, 4, experts=[7, 8, 9])) == 2
    # The router chooses of one, and what was recorded of the other.
    assert count_shared(routed, make_row(1, 2, 3)) == 0


def test_equal_tokens_that_follow_others_are_not_shared() -> None:
    """In the first row the fourth token follows the third, in the second the second one; later forks do not matter."""
    row, forked = make_row(1, 2, 3, 4, 5), replace(make_row(1, 2, 3, 4, 5), forks=(Fork(3, 1),))
    assert count_shared(row, forked) == count_shared(forked, row) == 3
    assert count_shared(forked, replace(make_row(1, 2, 3, 4, 5, 6), forks=(Fork(3, 1), Fork(5, 0)))) == 5
    assert count_shared(forked, replace(forked, forks=(Fork(3, 0),))) == 3
    assert [row.num_uncounted for row in counted_once([row, forked, row])] == [0, 3, 5]


def test_families_come_in_the_order_of_their_first_rows() -> None:
    rows = [
        make_row(5, 1, 9),
        make_row(3, 3),
        make_row(5, 2, 1, 7),
        make_row(4),
        make_row(5, 1, 8),
        make_row(5, 2, 1, 6),
        make_row(3),
        make_row(5, 2, 2),
    ]
    # 5 1 9, 5 1 8; 5 2 1 7, 5 2 1 6, 5 2 2; 3 3, 3; 4.
    assert family_order(rows) == [0, 4, 2, 5, 7, 1, 6, 3]
    assert family_order([make_row(i) for i in (4, 2, 300, 70000, 1)]) == [0, 1, 2, 3, 4]
    assert family_order([]) == []


def test_holders_by_hand() -> None:
    rows = [make_row(1, 2, 3), make_row(1, 5), make_row(9), make_row(1, 2, 4, 5), make_row(1, 2, 4, 6), make_row(1, 5)]
    assert [count for _, count in held_prefixes(rows)] == [0, 1, 0, 2, 3, 2]
    assert [holder for holder, count in held_prefixes(rows) if count] == [0, 0, 3, 1]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=12))
def test_no_row_shares_more_with_another(tokens: list[list[int]]) -> None:
    rows = [make_row(*each) for each in tokens]
    for k, (holder, count) in enumerate(held_prefixes(rows)):
        assert count == max((count_shared(rows[k], other) for other in rows[:k]), default=0)
        assert not k or count_shared(rows[holder], rows[k]) == count
    order = family_order(rows)
    assert sorted(order) == list(range(len(rows)))
    for place in range(1, len(rows)):
        row = rows[order[place]]
        shared = [count_shared(row, rows[other]) for other in order[:place]]
        assert shared[-1] == max(shared)
