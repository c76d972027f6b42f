"""Distribute rows over data-parallel ranks and micro-batches; the bins hold indices into `lengths`."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from megarl.errors import ConfigError, DataError

Bins: TypeAlias = list[list[int]]


@dataclass(slots=True)
class _Bin:
    """The rows of one bin, with the sum of their lengths."""

    total: int = 0
    indices: list[int] = field(default_factory=list)


def balance(lengths: Sequence[int], num_bins: int, *, equal_size: bool) -> Bins:
    """Split rows into bins of nearly equal sums by the largest differencing method (Karmarkar & Karp, 1982).

    `equal_size`: the bins' row counts differ by at most one. No bin is empty if there are at least `num_bins` rows.
    """
    _require_positive(lengths)
    if num_bins < 1:
        raise ConfigError(f"balance: got {num_bins} bins, expected >= 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    group = num_bins if equal_size else 1
    # A partial solution is a list of non-empty bins, heaviest first; the heap yields the one with the largest spread.
    heap = []
    for start in range(0, len(order), group):
        bins = [_Bin(lengths[i], [i]) for i in order[start : start + group]]
        heap.append((-_spread(bins, num_bins), start, bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # The heaviest bins of one partial solution are joined with the lightest of the other.
        overlap = max(0, len(first) + len(second) - num_bins)
        kept, joining = first[: len(first) - overlap], first[len(first) - overlap :]
        merged = [*kept]
        for a, b in zip(joining, reversed(second[len(second) - overlap :]), strict=True):
            small, large = sorted((a, b), key=lambda x: len(x.indices))
            large.indices.extend(small.indices)  # Neither is used again; moving the smaller one keeps this n·log n.
            large.total += small.total
            merged.append(large)
        merged += second[: len(second) - overlap]
        merged.sort(key=lambda b: -b.total)
        heapq.heappush(heap, (-_spread(merged, num_bins), number, merged))
    bins = heap[0][2] if heap else []
    return [sorted(b.indices) for b in bins] + [[] for _ in range(num_bins - len(bins))]


def micro_batches(lengths: Sequence[int], max_tokens: int, min_bins: int = 1) -> Bins:
    """Split rows into at least `min_bins` micro-batches of at most `max_tokens` tokens, the heaviest first.

    The search starts from k = max(⌈Σ lengths / max_tokens⌉, rows longer than max_tokens / 2, min_bins) bins, puts the
    rows, longest first, into the lightest bin, and raises k (by one, or 2 %) until every bin fits. Bins are empty only
    if there are fewer rows than `min_bins`. Raises ConfigError for a row that is too long by itself.
    """
    _require_positive(lengths)
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ConfigError(
                f"row {index} has {length} tokens, actor.micro_batch_tokens is {max_tokens}; "
                f"set actor.micro_batch_tokens >= {length}"
            )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_long = sum(2 * length > max_tokens for length in lengths)  # no two of them fit together
    num_bins = max(-(-sum(lengths) // max_tokens), num_long, min_bins)
    while True:
        bins = [_Bin() for _ in range(num_bins)]
        lightest = [(0, number) for number in range(num_bins)]
        for index in order:
            total, number = lightest[0]
            bins[number].indices.append(index)
            bins[number].total = total + lengths[index]
            heapq.heapreplace(lightest, (bins[number].total, number))
        if all(b.total <= max_tokens for b in bins):
            bins.sort(key=lambda b: (-b.total, b.indices))
            return [sorted(b.indices) for b in bins]
        # The loop ends because all rows fit once each has its own bin.
        num_bins = min(num_bins + max(1, num_bins // 50), len(lengths))


def plan_micro_batches(lengths: Sequence[int], dp: int, max_tokens: int, *, multiple: int = 1) -> list[Bins]:
    """Split rows into the micro-batches of each of `dp` ranks.

    Every rank gets the same number of micro-batches, a multiple of `multiple` (for interleaved pipelines), and the
    ranks' row counts differ by at most one. A micro-batch is empty only if there are fewer rows than `dp` × the number
    of micro-batches, which happens only if `dp` does not divide the row count. With fewer rows than ranks, some ranks
    have only empty micro-batches.
    """
    if not lengths:
        raise DataError("got no rows to split over data-parallel ranks, expected at least one; skip the pass")
    for_rank = balance(lengths, dp, equal_size=True)
    num_bins = multiple
    while True:
        by_rank = [micro_batches([lengths[i] for i in indices], max_tokens, num_bins) for indices in for_rank]
        counts = {len(bins) for bins in by_rank}
        if len(counts) == 1 and max(counts) % multiple == 0:
            return [
                [[indices[i] for i in members] for members in bins]
                for indices, bins in zip(for_rank, by_rank, strict=True)
            ]
        num_bins = -(-max(counts) // multiple) * multiple


def _spread(bins: list[_Bin], num_bins: int) -> int:
    """Return the difference in tokens between the heaviest (first) and the lightest bin of a partial solution."""
    return bins[0].total - (bins[-1].total if len(bins) == num_bins else 0)


def _require_positive(lengths: Sequence[int]) -> None:
    """Raise DataError if a row has no tokens."""
    for index, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"row {index} has {length} tokens, expected at least one")
