"""Split a teacher's output weight over ranks at the same tokens as the student's."""

import torch
import torch.distributed as dist

from megarl.parallel.head.statistics import VocabShard, gather_parts


def resplit_weight(weight: torch.Tensor, own: VocabShard, like: VocabShard) -> tuple[torch.Tensor, VocabShard]:
    """Split a teacher's output weight over ranks as the student's: from `like.start` to the next rank's start.

    weight: [≥ own.size, H'], this rank's rows `own` of the teacher's. The last rank gets all that are left. Every rank
    of the group calls this. Where the two are split alike already, the arguments are returned.
    """
    group, rank, size = own.group, own.group.rank(), own.group.size()
    if size == 1:
        return weight, own
    spans = torch.tensor([own.start, own.size, like.start], device=weight.device)
    table = gather_parts(spans[:, None], group)[:, :, 0].tolist()
    end = max(start + count for start, count, _ in table if count)
    # Trailing ranks without a token have no start of their own.
    starts = [min(start, end) for _, _, start in table]
    stops = [*starts[1:], end]
    if all(start == first or not count for (start, count, _), first in zip(table, starts, strict=True)):
        return weight, VocabShard(group=group, start=like.start, size=own.size)
    made = weight.new_empty(stops[rank] - starts[rank], weight.shape[1])
    transfers = []
    for source, (start, count, _) in enumerate(table):
        for target in range(size):
            first, last = max(start, starts[target]), min(start + count, stops[target])
            if first >= last or rank not in (source, target):
                continue
            here = weight.detach()[first - own.start : last - own.start]
            there = made[first - starts[rank] : last - starts[rank]]
            if source == target:
                there.copy_(here)
            elif rank == source:
                transfers.append(dist.P2POp(dist.isend, here.contiguous(), group=group, group_peer=target))
            else:
                transfers.append(dist.P2POp(dist.irecv, there, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()
    return made, VocabShard(group=group, start=like.start, size=len(made))
