"""Balancing and micro-batches: examples worked out by hand, and properties."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import Bins, balance, imbalance_metrics, micro_batches, plan_micro_batches, runs
from megarl.errors import ConfigError, DataError

lengths_lists = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def totals(lengths: list[int], bins: Bins) -> list[int]:
    return [sum(lengths[i] for i in members) for members in bins]


def assert_partition(bins: Bins, num_rows: int) -> None:
    assert sorted(i for members in bins for i in members) == list(range(num_rows))


def test_balance_is_largest_differencing() -> None:
    # The textbook case: 8−7=1, 6−5=1, then 4−1=3, then 3−1=2. So 16 and 14, where greedy gives 17 and 13.
    lengths = [4, 8, 5, 7, 6]
    bins = balance(lengths, 2)
    assert_partition(bins, 5)
    assert sorted(totals(lengths, bins)) == [14, 16]


@given(st.lists(st.integers(1, 60), min_size=64, max_size=200), st.integers(1, 8))
def test_balance_is_within_three_percent_where_the_longest_row_allows(lengths: list[int], num_bins: int) -> None:
    """Costs as FLOPs grow with length, linearly and by the square; there are at least eight rows per bin."""
    costs = [200 * n + n * n for n in lengths]
    sums = totals(costs, balance(costs, num_bins))
    assert max(sums) <= max(1.03 * sum(costs) / num_bins, max(costs))


@given(lengths_lists, st.integers(1, 12))
def test_balance_properties(lengths: list[int], num_bins: int) -> None:
    bins = balance(lengths, num_bins)
    assert len(bins) == num_bins
    assert_partition(bins, len(lengths))
    sizes = [len(members) for members in bins]
    assert sum(size == 0 for size in sizes) == max(0, num_bins - len(lengths))
    assert all(members == sorted(members) for members in bins)
    # Differencing never leaves a spread larger than the longest row.
    sums = totals(lengths, bins)
    assert max(sums) - min(sums) <= max(lengths)
    assert balance(lengths, num_bins) == bins


def test_micro_batches_by_hand() -> None:
    # 21 tokens need three bins of 9: 6 | 5 | 4+3 | … 3 goes to the 4, the last 3 to the 5.
    assert micro_batches([3, 6, 4, 5, 3], 9) == [[3, 4], [0, 2], [1]]
    # 18 tokens would fit two bins of 9 by count, but of 6, 6, 6 no two fit together.
    assert micro_batches([6, 6, 6], 9) == [[0], [1], [2]]
    # Three of 4 in 12 tokens: one bin; more are used when asked for, the heaviest first.
    assert micro_batches([4, 4, 4], 12) == [[0, 1, 2]]
    assert micro_batches([4, 4, 4], 12, min_bins=2) == [[0, 2], [1]]
    assert micro_batches([4], 12, min_bins=2) == [[0], []]


def test_a_row_that_fits_no_micro_batch() -> None:
    with pytest.raises(ConfigError, match=r"row 1 has 10 tokens, actor.micro_batch_tokens is 9; set .* >= 10"):
        micro_batches([3, 10], 9)
    with pytest.raises(DataError, match="row 1 has 0 tokens"):
        micro_batches([3, 0], 9)


@given(lengths_lists, st.integers(100, 400), st.integers(1, 8))
def test_micro_batch_properties(lengths: list[int], max_tokens: int, min_bins: int) -> None:
    bins = micro_batches(lengths, max_tokens, min_bins)
    assert_partition(bins, len(lengths))
    assert len(bins) >= min_bins
    sums = totals(lengths, bins)
    assert max(sums) <= max_tokens
    assert sums == sorted(sums, reverse=True)
    assert sum(not members for members in bins) == max(0, min_bins - len(lengths))
    assert micro_batches(lengths, max_tokens, min_bins) == bins


def test_plan_by_hand() -> None:
    # Ranks: 9 and 5+4+1. The second needs two micro-batches of 9 tokens, so the first has two, one of them empty.
    plan = plan_micro_batches([9, 1, 5, 4], 2, 9)
    assert sorted(plan) == [[[0], []], [[2], [1, 3]]]
    # By costs that weigh the 9 less, the ranks are 9+1 and 5+4.
    assert sorted(plan_micro_batches([9, 1, 5, 4], 2, 9, costs=[8, 1, 5, 4])) == [[[0], [1]], [[2], [3]]]


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=8), st.integers(1, 4))
def test_no_other_runs_are_cheaper(rows: list[tuple[int, bool]], num_bins: int) -> None:
    """Every way to cut the rows, with half of the costs saved beside a row of the same prompt."""
    costs = [30 + cost for cost, _ in rows]
    savings = [0, *(25 if same else 0 for _, same in rows[1:])]

    def most(bins: Bins) -> int:
        return max(sum(costs[i] for i in own) - sum(savings[i] for i in own[1:]) for own in bins if own)

    bins = runs(costs, num_bins, savings)
    assert len(bins) == num_bins
    assert [i for members in bins for i in members] == list(range(len(rows)))
    cuts = itertools.combinations_with_replacement(range(len(rows) + 1), num_bins - 1)
    possible = [[list(range(a, b)) for a, b in itertools.pairwise((0, *cut, len(rows)))] for cut in cuts]
    assert most(bins) == min(map(most, possible))


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=80),
    st.integers(1, 6),
    st.integers(100, 300),
    st.integers(1, 3),
)
def test_plan_properties(lengths: list[int], dp: int, max_tokens: int, multiple: int) -> None:
    plan = plan_micro_batches(lengths, dp, max_tokens, multiple=multiple)
    assert len(plan) == dp
    assert_partition([members for bins in plan for members in bins], len(lengths))
    (num_bins,) = {len(bins) for bins in plan}
    assert num_bins >= 1
    assert num_bins % multiple == 0
    assert all(total <= max_tokens for bins in plan for total in totals(lengths, bins))
    sizes = [sum(len(members) for members in bins) for bins in plan]
    # A rank leaves a micro-batch empty only for want of rows.
    empty = [sum(not members for members in bins) for bins in plan]
    assert empty == [max(0, num_bins - size) for size in sizes]
    assert plan_micro_batches(lengths, dp, max_tokens, multiple=multiple) == plan


def test_plan_in_runs_by_hand() -> None:
    # Prompts of 5 tokens: rows 0 to 3 share one, 4 and 5 another. Ranks: 6+1+1+1 and 6+1. In micro-batches of 8 tokens
    # that count a prompt once, the first needs two, so the second has two.
    shared = [0, 5, 5, 5, 0, 5]
    plan = plan_micro_batches([6] * 6, 2, 8, shared=shared)
    assert plan == [[[0, 1], [2, 3]], [[4], [5]]]
    # The first row of a micro-batch pays for its prompt: (6+1) + (6+1) against 6 + 6. Of 36 tokens, 26 are computed.
    found = imbalance_metrics(plan, [6] * 6, [6] * 6, shared, shared)
    assert found["global_seqlen/tokens_imbalance"] == found["global_seqlen/flops_imbalance"] == 28 / 26
    assert found["perf/shared_tokens_frac"] == pytest.approx(10 / 36)
    # In 9 tokens, all rows of a prompt fit.
    assert plan_micro_batches([6] * 6, 2, 9, shared=shared) == [[[0, 1, 2, 3]], [[4, 5]]]
    # What is saved may weigh less than the tokens: by costs of 6+5+5 and 6+6+5, the last row of the first prompt moves.
    savings = [0, 1, 1, 1, 0, 1]
    assert plan_micro_batches([6] * 6, 2, 13, shared=shared, savings=savings) == [[[0, 1, 2]], [[3, 4, 5]]]


def test_imbalance_by_hand() -> None:
    # Ranks with 9 and 10 tokens, and costs of 81 and 42.
    lengths = [9, 1, 5, 4]
    plan = [[[0], []], [[1, 3], [2]]]
    assert imbalance_metrics(plan, lengths, [n * n for n in lengths]) == {
        "global_seqlen/mean": 9.5,
        "global_seqlen/balanced_min": 9.0,
        "global_seqlen/balanced_max": 10.0,
        "global_seqlen/tokens_imbalance": 20 / 19,
        "global_seqlen/flops_imbalance": 162 / 123,
        "perf/shared_tokens_frac": 0.0,
    }


def test_plan_of_nothing() -> None:
    with pytest.raises(DataError, match="got no rows to split over data-parallel ranks"):
        plan_micro_batches([], 2, 9)
