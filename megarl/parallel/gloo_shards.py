"""Exchange the shards of the distributed optimizer's buffers over gloo: each goes only to the ranks that need it.

Gloo's own reduce-scatter is an all-reduce of a copy of the whole buffer, and both of its collectives copy what a rank
keeps. All buffers are of n equal shards for n ranks of a group.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist


def reduce_scatter(shard: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum the ranks' buffers [n·s], and put this rank's part of the sum into `shard` [s], which may lie in the buffer.

    Each rank sends and receives (n − 1)·s elements, and needs memory for as many.
    """
    parts, own = buffer.view(group.size(), -1), group.rank()
    received = {rank: torch.empty_like(shard) for rank in range(len(parts)) if rank != own}
    _exchange({rank: parts[rank] for rank in received}, received, group)
    if shard.data_ptr() != parts[own].data_ptr():
        shard.copy_(parts[own])
    for part in received.values():
        shard.add_(part)


def all_gather(buffer: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Put the ranks' shards [s], end to end, into `buffer` [n·s]; this rank's shard may lie there already."""
    parts, own = buffer.view(group.size(), -1), group.rank()
    if shard.data_ptr() != parts[own].data_ptr():
        parts[own].copy_(shard)
    others = [rank for rank in range(len(parts)) if rank != own]
    _exchange(dict.fromkeys(others, shard), {rank: parts[rank] for rank in others}, group)


def _exchange(sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Send tensors to other ranks and receive theirs; both mappings have the ranks within the group as keys."""
    works = [group.send([part], rank, 0) for rank, part in sent.items()]
    works += [group.recv([part], rank, 0) for rank, part in received.items()]
    for work in works:
        work.wait()
