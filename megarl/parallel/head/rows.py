"""Gather hidden states that the ranks of a group hold in uneven parts, and reduce their gradient back to the owners."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOwners:
    """How many consecutive rows of a tensor [N, ...] (one per token) each rank owns, in rank order.

    `counts` is None if every rank has all rows. Where it has more than one number per rank, run i is of rank i modulo
    the group's size.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...] | None

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather all rows [N, ...] from each rank's [n, ...], without padding even if the ranks' n differ."""
        if self.counts is None or self.group.size() == 1:
            return rows
        gathered = rows.new_empty(sum(self.counts), *rows.shape[1:])
        # Neither backend gathers parts of different sizes without padding or copies; a broadcast from each owner does.
        parts, size = gathered.split(list(self.counts)), self.group.size()
        mine = parts[self.group.rank() :: size]
        for part, own in zip(mine, rows.split([len(part) for part in mine]), strict=True):
            part.copy_(own)
        wait_all(
            [
                dist.broadcast(part, group_src=run % size, group=self.group, async_op=True)
                for run, part in enumerate(parts)
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
            dist.reduce(partial[first:last], group_dst=run % self.group.size(), group=self.group, async_op=True)
            for run, first, last in overlaps(self.counts, start, len(partial))
        ]

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor that has all rows [N, ...]."""
        if self.counts is None:
            return rows
        mine = rows.split(list(self.counts))[self.group.rank() :: self.group.size()]
        return mine[0] if len(mine) == 1 else torch.cat(mine)


def overlaps(counts: Sequence[int], start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (run, first, last) for each run of so many consecutive rows that has some of [start, start + length);
    relative to `start`.
    """
    begin = -start
    for run, count in enumerate(counts):
        first, last = max(begin, 0), min(begin + count, length)
        if first < last:
            yield run, first, last
        begin += count


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
