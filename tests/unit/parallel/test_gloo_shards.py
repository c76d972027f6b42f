"""Shards that ranks sum and gather over gloo: three ranks as threads of this process, with sums by hand."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.host.device.groups import gloo_group
from megarl.parallel.gloo_shards import all_gather, reduce_scatter


def on_ranks(size: int, function: Callable[[int, dist.ProcessGroup], list[float]]) -> list[list[float]]:
    store = dist.HashStore()

    def run(rank: int) -> list[float]:
        return function(rank, gloo_group(store, rank, size, timedelta(seconds=20)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("inside", [True, False], ids=["in the buffer", "apart"])
def test_each_rank_gets_its_part_of_the_sum(inside: bool) -> None:
    def sums(rank: int, group: dist.ProcessGroup) -> list[float]:
        # Rank r has r+1 times 1 to 6; the ranks' factors sum to 6.
        buffer = (rank + 1) * torch.arange(1.0, 7.0)
        shard = buffer[2 * rank : 2 * rank + 2] if inside else torch.full((2,), 9.0)
        reduce_scatter(shard, buffer, group)
        assert buffer[:2].tolist() == ([6.0, 12.0] if inside and rank == 0 else [rank + 1.0, 2 * (rank + 1.0)])
        return shard.tolist()

    assert on_ranks(3, sums) == [[6.0, 12.0], [18.0, 24.0], [30.0, 36.0]]


@pytest.mark.parametrize("inside", [True, False], ids=["in the buffer", "apart"])
def test_all_ranks_get_all_shards(inside: bool) -> None:
    def gathered(rank: int, group: dist.ProcessGroup) -> list[float]:
        buffer = torch.zeros(6)
        shard = buffer[2 * rank : 2 * rank + 2] if inside else torch.empty(2)
        shard.copy_(torch.tensor([10.0 * rank, 10.0 * rank + 1]))
        all_gather(buffer, shard, group)
        return buffer.tolist()

    assert on_ranks(3, gathered) == [[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]] * 3


def test_one_rank_has_it_all() -> None:
    def both(rank: int, group: dist.ProcessGroup) -> list[float]:
        buffer = torch.tensor([1.0, 2.0])
        shard = torch.empty(2)
        reduce_scatter(shard, buffer, group)
        assert shard.tolist() == [1.0, 2.0]
        all_gather(buffer, 3 * shard, group)
        return buffer.tolist()

    assert on_ranks(1, both) == [[3.0, 6.0]]
