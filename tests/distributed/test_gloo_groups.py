"""Gloo groups of a process share the thread that serves their connections, and nobody else can join them."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist

from megarl.host.device.groups import abort_group, gloo_group
from tests.helpers.rank_pool import RankContext, RankPool

NUM_GROUPS = 5
# More bytes than sockets hold, so that both ends have to read and write at once.
LARGE = 1 << 20


class Seen(NamedTuple):
    """The sums of a rank's groups, the rank's threads that serve connections, and the states of its sockets of TCP."""

    sums: list[float]
    num_threads: int
    sockets: list[str]


def make_groups(context: RankContext) -> list[dist.ProcessGroup]:
    store = dist.FileStore(f"{context.directory}/groups", context.world_size)
    stores = [dist.PrefixStore(str(i), store) for i in range(NUM_GROUPS)]
    return [gloo_group(each, context.rank, context.world_size, timedelta(seconds=60)) for each in stores]


def add_up(context: RankContext, address: str) -> Seen:
    """Abort the first of several groups; add up 1 + rank in the others."""
    before = {connection.fd for connection in psutil.Process().net_connections("tcp")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGARL_HOST_ADDRESS", address)
        groups = make_groups(context)
    abort_group(groups[0])
    sums = []
    for group in groups[1:]:
        numbers = torch.full((LARGE,), 1.0 + context.rank)
        group.allreduce([numbers]).wait()
        sums += numbers.unique().tolist()
    # torch's flight recorder, whose records would lie scattered in the memory that tensors free, has none.
    assert b'"entries"' not in torch._C._distributed_c10d._dump_fr_trace_json(True, False)
    connections = [each for each in psutil.Process().net_connections("tcp") if each.fd not in before]
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    # Until the other has looked, too.
    groups[1].barrier().wait()
    return Seen(sums, threads.count("gloo_tcp_loop"), [each.status for each in connections])


@pytest.mark.parametrize(
    ("address", "num_connections"),
    # Of several hosts, a connection of each rank with the other, but for the aborted group.
    [("127.0.0.1", 0), ("127.0.0.2", NUM_GROUPS - 1)],
    ids=["one host", "several hosts"],
)
def test_groups_share_a_device_at_which_nothing_listens(
    rank_pool: Callable[[int], RankPool], address: str, num_connections: int
) -> None:
    seen = rank_pool(2).run(add_up, address)
    assert [each.sums for each in seen] == [[3.0] * (NUM_GROUPS - 1)] * 2
    assert [each.num_threads for each in seen] == [1, 1]
    assert [each.sockets for each in seen] == [["ESTABLISHED"] * num_connections] * 2


def miss(context: RankContext) -> str:
    """Wait for the last of three ranks, which leaves its groups; return what comes instead."""
    *_, group = make_groups(context)
    if context.rank == 2:
        return ""
    with pytest.raises(RuntimeError) as raised:
        group.recv([torch.empty(1)], 2, 0).wait()
    return str(raised.value)


def test_a_rank_that_leaves_is_noticed(rank_pool: Callable[[int], RankPool]) -> None:
    *found, _ = rank_pool(3).run(miss)
    assert all("Connection closed by peer" in each for each in found), found
