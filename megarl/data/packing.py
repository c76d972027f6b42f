"""Distribute rows (samples) over data-parallel ranks and micro-batches, by their lengths or costs.

A bin is a rank's or a micro-batch's share: a list of row indices. Rows are split freely, or, if neighbours are cheaper
together, into runs of neighbours.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from megarl.errors import ConfigError, DataError

Bins: TypeAlias = list[list[int]]


@dataclass(slots=True)
class _Bin:
    """One bin (a rank's or micro-batch's share): the indices of its rows, and the sum of their costs or lengths."""

    total: int = 0
    indices: list[int] = field(default_factory=list)


def balance(costs: Sequence[int], num_bins: int) -> Bins:
    """Split rows into bins of nearly equal costs by the largest differencing method (Karmarkar & Karp, 1982).

    Bins may differ in their numbers of rows: one may have few long rows, another many short rows. No bin is empty if
    there are at least `num_bins` rows.
    """
    _require_positive(costs)
    if num_bins < 1:
        raise ConfigError(f"balance: got {num_bins} bins, expected >= 1")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    # A partial solution is a list of non-empty bins, heaviest first; the heap yields the one with the largest spread.
    heap, by_total = [], attrgetter("total")
    for number, i in enumerate(order):
        bins = [_Bin(costs[i], [i])]
        heap.append((-_spread(bins, num_bins), number, bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # The heaviest bins of one partial solution are joined with the lightest of the other.
        overlap = max(0, len(first) + len(second) - num_bins)
        kept, joining = first[: len(first) - overlap], first[len(first) - overlap :]
        merged = [*kept]
        for a, b in zip(joining, reversed(second[len(second) - overlap :]), strict=True):
            small, large = (a, b) if len(a.indices) <= len(b.indices) else (b, a)
            large.indices.extend(small.indices)  # Neither is used again; moving the smaller one keeps this n·log n.
            large.total += small.total
            merged.append(large)
        merged += second[: len(second) - overlap]
        merged.sort(key=by_total, reverse=True)
        heapq.heappush(heap, (-_spread(merged, num_bins), number, merged))
    bins = heap[0][2] if heap else []
    return [sorted(b.indices) for b in bins] + [[] for _ in range(num_bins - len(bins))]


def runs(costs: Sequence[int], num_bins: int, savings: Sequence[int] | None = None) -> Bins:
    """Split rows into runs of neighbours, at most `num_bins`, of which the most expensive is as cheap as it can be.

    savings: how much less a row costs if the row before it is in the same run. The rest of the bins are empty.
    """
    _require_positive(costs)
    savings = [0] * len(costs) if savings is None else savings

    def fill(most: int) -> Bins:
        bins, total = [list[int]()], 0
        for i, (cost, saving) in enumerate(zip(costs, savings, strict=True)):
            if bins[-1] and total + cost - saving > most:
                bins.append([])
            total = total + cost - saving if bins[-1] else cost
            bins[-1].append(i)
        return bins

    low, high = max(costs, default=0), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(fill(middle)) <= num_bins:
            high = middle
        else:
            low = middle + 1
    bins = fill(high)
    return bins + [[] for _ in range(num_bins - len(bins))]


def lightest_first(costs: Sequence[int], num_bins: int) -> Bins:
    """Put the rows, the most expensive first, each into the bin that is the lightest so far."""
    bins: Bins = [[] for _ in range(num_bins)]
    lightest = [(0, number) for number in range(num_bins)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, number = lightest[0]
        bins[number].append(index)
        heapq.heapreplace(lightest, (total + costs[index], number))
    return bins


def micro_batches(
    lengths: Sequence[int], max_tokens: int, min_bins: int = 1, *, shared: Sequence[int] | None = None
) -> Bins:
    """Split rows into at least `min_bins` micro-batches of at most `max_tokens` tokens, the heaviest first.

    The search starts from k = max(⌈Σ lengths / max_tokens⌉, rows longer than max_tokens / 2, min_bins) bins, puts rows
    into the lightest of them, and raises k (by one, or 2 %) until every bin fits. Bins are empty only if there are
    fewer rows than `min_bins`. Raises ConfigError for a row that is too long by itself.

    shared: how many tokens each row shares with the row before it. Bins are then runs of rows, in which tokens that are
    shared count once, and more of them may be empty.
    """
    _require_positive(lengths)
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ConfigError(
                f"row {index} has {length} tokens, actor.micro_batch_tokens is {max_tokens}; "
                f"set actor.micro_batch_tokens >= {length}"
            )
    if shared is None:
        num_long = sum(2 * length > max_tokens for length in lengths)  # no two of them fit together
        num_bins = max(-(-sum(lengths) // max_tokens), num_long, min_bins)
    else:
        num_bins = max(-(-(sum(lengths) - sum(shared[1:])) // max_tokens), min_bins)
    while True:
        bins = lightest_first(lengths, num_bins) if shared is None else runs(lengths, num_bins, shared)
        totals = [_total(members, lengths, shared) for members in bins]
        if max(totals) <= max_tokens:
            return [sorted(bins[k]) for k in sorted(range(num_bins), key=lambda k: (-totals[k], bins[k]))]
        # The loop ends because all rows fit once each has its own bin.
        num_bins = min(num_bins + max(1, num_bins // 50), len(lengths))


def plan_micro_batches(
    lengths: Sequence[int],
    dp: int,
    max_tokens: int,
    *,
    multiple: int = 1,
    costs: Sequence[int] | None = None,
    shared: Sequence[int] | None = None,
    savings: Sequence[int] | None = None,
) -> list[Bins]:
    """Split rows into micro-batches for each of `dp` ranks, so that all ranks get nearly equal costs.

    costs: the cost of each row; None: its length. shared, savings: how many tokens a row shares with the row before it,
    and how much less it costs beside that; ranks and micro-batches then get runs of rows. Every rank gets the same
    number of micro-batches, a multiple of `multiple` (for interleaved pipelines). Some of a rank's micro-batches are
    empty if it has few rows.
    """
    if not lengths:
        raise DataError("got no rows to split over data-parallel ranks, expected at least one; skip the pass")
    costs, savings = lengths if costs is None else costs, shared if savings is None else savings
    for_rank = balance(costs, dp) if savings is None else runs(costs, dp, savings)
    num_bins = multiple
    while True:
        by_rank = [
            micro_batches(
                [lengths[i] for i in own],
                max_tokens,
                num_bins,
                shared=None if shared is None else [shared[i] for i in own],
            )
            for own in for_rank
        ]
        counts = {len(bins) for bins in by_rank}
        if len(counts) == 1 and max(counts) % multiple == 0:
            return [
                [[indices[i] for i in members] for members in bins]
                for indices, bins in zip(for_rank, by_rank, strict=True)
            ]
        num_bins = -(-max(counts) // multiple) * multiple


def imbalance_metrics(
    plan: Sequence[Bins],
    lengths: Sequence[int],
    costs: Sequence[int],
    shared: Sequence[int] | None = None,
    savings: Sequence[int] | None = None,
) -> dict[str, float]:
    """Return metrics of how evenly a plan loads the data-parallel ranks, and of the tokens that rows share.

    global_seqlen/{mean,balanced_min,balanced_max}: tokens that a rank computes. global_seqlen/tokens_imbalance and
    flops_imbalance: largest over mean, of tokens and of costs; all ranks wait for the one with the most work.
    perf/shared_tokens_frac: the share of the rows' tokens that are not computed, as a row of the same micro-batch has
    them. The arguments are those of the plan.
    """
    tokens = [sum(_total(members, lengths, shared) for members in rank) for rank in plan]
    work = [sum(_total(members, costs, savings) for members in rank) for rank in plan]
    return {
        "global_seqlen/mean": sum(tokens) / len(plan),
        "global_seqlen/balanced_min": float(min(tokens)),
        "global_seqlen/balanced_max": float(max(tokens)),
        "global_seqlen/tokens_imbalance": max(tokens) * len(plan) / sum(tokens),
        "global_seqlen/flops_imbalance": max(work) * len(plan) / sum(work),
        "perf/shared_tokens_frac": 1 - sum(tokens) / sum(lengths),
    }


def _total(members: Sequence[int], costs: Sequence[int], savings: Sequence[int] | None) -> int:
    """Sum the costs of a bin's rows, of which all but the first save what they share with the row before."""
    return sum(costs[i] for i in members) - (0 if savings is None else sum(savings[i] for i in members[1:]))


def _spread(bins: list[_Bin], num_bins: int) -> int:
    """Return the difference in cost between the heaviest (first) and the lightest bin of a partial solution."""
    return bins[0].total - (bins[-1].total if len(bins) == num_bins else 0)


def _require_positive(lengths: Sequence[int]) -> None:
    """Raise DataError if a row has no tokens."""
    for index, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"row {index} has {length} tokens, expected at least one")
