"""Gloo groups of a process share the thread that serves their connections, and nothing else."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.host.device.groups import abort_group, gloo_group
from megarl.parallel import cpu_shim
from tests.helpers.rank_pool import RankContext, RankPool

NUM_GROUPS = 5


def add_up(context: RankContext) -> tuple[list[float], int]:
    """Abort the first of several groups; return the others' sums of 1 + rank, and this process's serving threads."""
    cpu_shim.install()
    store = dist.FileStore(f"{context.directory}/groups", context.world_size)
    groups = [
        gloo_group(dist.PrefixStore(str(i), store), context.rank, context.world_size, timedelta(seconds=60))
        for i in range(NUM_GROUPS)
    ]
    abort_group(groups[0])
    sums = []
    for group in groups[1:]:
        number = torch.tensor([1.0 + context.rank])
        group.allreduce([number]).wait()
        sums.append(number.item())
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sums, threads.count("gloo_tcp_loop")


def test_groups_share_a_device(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(add_up) == [([3.0] * (NUM_GROUPS - 1), 1)] * 2
