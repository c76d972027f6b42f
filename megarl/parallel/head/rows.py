"""Kept rows of a pack, of which a sequence-parallel rank holds a part: gathered once, reduced back to their owners."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOwners:
    """How many consecutive rows each rank of a group holds, in rank order; None: every rank holds all of them."""

    group: dist.ProcessGroup
    counts: tuple[int, ...] | None

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, H] all rows from this rank's [n, H]: as many bytes as there are rows, however uneven the parts."""
        if self.counts is None or self.group.size() == 1:
            return rows
        gathered = rows.new_empty(sum(self.counts), rows.shape[1])
        # Neither backend gathers parts of different sizes without padding or copies; a broadcast from each owner does.
        parts = gathered.split(list(self.counts))
        parts[self.group.rank()].copy_(rows)
        wait_all([broadcast(part, owner, self.group) for owner, part in enumerate(parts) if len(part)])
        return gathered

    def start_reduction(self, partial: torch.Tensor, start: int) -> list[dist.Work]:
        """Begin to sum rows [start, start + len) over ranks in place: for all of them, or for each row's owner."""
        if self.group.size() == 1 or not len(partial):
            return []
        if self.counts is None:
            return [_work(dist.all_reduce(partial, group=self.group, async_op=True))]
        return [
            _work(dist.reduce(partial[first:last], group_dst=owner, group=self.group, async_op=True))
            for owner, first, last in self._overlaps(start, len(partial))
        ]

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of all rows."""
        return rows if self.counts is None else rows.split(list(self.counts))[self.group.rank()]

    def _overlaps(self, start: int, length: int) -> Sequence[tuple[int, int, int]]:
        """(owner, first, last) of the parts of rows [start, start + length), relative to `start`."""
        assert self.counts is not None
        overlaps, begin = [], -start
        for owner, count in enumerate(self.counts):
            first, last = max(begin, 0), min(begin + count, length)
            if first < last:
                overlaps.append((owner, first, last))
            begin += count
        return overlaps


def broadcast(tensor: torch.Tensor, owner: int, group: dist.ProcessGroup) -> dist.Work:
    """Begin a broadcast from a rank of the group."""
    return _work(dist.broadcast(tensor, group_src=owner, group=group, async_op=True))


def wait_all(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _work(handle: dist.Work | None) -> dist.Work:
    assert handle is not None, "this process is not in the group"
    return handle
