"""Gather hidden states that the ranks of a group hold in uneven parts, and reduce their gradient back to the owners."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOwners:
    """How many consecutive rows of a tensor [N, ...] (one per token) each rank owns, in rank order.

    `counts` is None if every rank has all rows.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...] | None

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather all rows [N, ...] from each rank's [n, ...], without padding even if the ranks' n differ."""
        if self.counts is None or self.group.size() == 1:
            return rows
        gathered = rows.new_empty(sum(self.counts), *rows.shape[1:])
        # Neither backend gathers parts of different sizes without padding or copies; a broadcast from each owner does.
        parts = gathered.split(list(self.counts))
        parts[self.group.rank()].copy_(rows)
        wait_all(
            [
                dist.broadcast(part, group_src=owner, group=self.group, async_op=True)
                for owner, part in enumerate(parts)
                if len(part)
            ]
        )
        return gathered

    def start_reduction(self, partial: torch.Tensor, start: int) -> "list[dist.Work | None]":
        """Start to sum `partial` (the tensor's rows from `start` on) over ranks, in place; each row's owner gets the
        sum.
        """
        if self.group.size() == 1 or not len(partial):
            return []
        if self.counts is None:
            return [dist.all_reduce(partial, group=self.group, async_op=True)]
        return [
            dist.reduce(partial[first:last], group_dst=owner, group=self.group, async_op=True)
            for owner, first, last in self._overlaps(start, len(partial))
        ]

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor that has all rows [N, ...]."""
        return rows if self.counts is None else rows.split(list(self.counts))[self.group.rank()]

    def _overlaps(self, start: int, length: int) -> Sequence[tuple[int, int, int]]:
        """Yield (owner, first, last) for each rank that owns some of the rows [start, start + length); relative to
        `start`.
        """
        assert self.counts is not None
        overlaps, begin = [], -start
        for owner, count in enumerate(self.counts):
            first, last = max(begin, 0), min(begin + count, length)
            if first < last:
                overlaps.append((owner, first, last))
            begin += count
        return overlaps


def wait_all(works: "Sequence[dist.Work | None]") -> None:
    """Wait for asynchronous collectives to finish. A `None` among them means that this process is not in the group."""
    for work in works:
        assert work is not None, "this process is not in the group"
        work.wait()


def uneven_owners(num_rows: int, group: dist.ProcessGroup, device: torch.device) -> RowOwners:
    """All-gather how many rows of a tensor each rank of a group holds, and return the numbers as `RowOwners`."""
    if group.size() == 1:
        return RowOwners(group=group, counts=None)
    counts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(counts, torch.tensor([num_rows], device=device), group=group)
    return RowOwners(group=group, counts=tuple(counts.tolist()))
