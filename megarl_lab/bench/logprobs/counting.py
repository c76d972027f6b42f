"""Counting of collectives where all of them pass: at the methods of the process group."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megarl_lab.bench.logprobs.records import Traffic

# Method of a process group → place of the tensors that a rank hands in.
_INPUT_PLACE: Mapping[str, int] = {
    "_allgather_base": 1,
    "_reduce_scatter_base": 1,
    "all_gather_single": 1,
    "all_gather_single_coalesced": 1,
    "all_to_all_single": 1,
    "allgather": 1,
    "allgather_coalesced": 1,
    "allgather_into_tensor_coalesced": 1,
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "alltoall": 1,
    "alltoall_base": 1,
    "broadcast": 0,
    "gather": 1,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_single_coalesced": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "scatter": 1,
}


@dataclass(kw_only=True)
class _Tally:
    num_collectives: int = 0
    num_bytes: int = 0


class CollectiveCount:
    """Counts so far; `traffic()` once the block is left."""

    def __init__(self) -> None:
        self._tally = _Tally()

    def add(self, tensors: Any) -> None:
        self._tally.num_collectives += 1
        self._tally.num_bytes += _num_bytes(tensors)

    def traffic(self) -> Traffic:
        return Traffic(num_collectives=self._tally.num_collectives, num_bytes=self._tally.num_bytes)


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Count this process's collectives of all groups, whatever function of torch they are called by.

    Groups number their collectives: RuntimeError if those went up by another number than was counted.
    """
    count, before = CollectiveCount(), _sequence_numbers()
    with ExitStack() as stack:
        for name, place in _INPUT_PLACE.items():
            if hasattr(dist.ProcessGroup, name):
                counted = _counted(getattr(dist.ProcessGroup, name), place, count)
                stack.enter_context(patch.object(dist.ProcessGroup, name, counted))
        yield count
    num_missed = _sequence_numbers() - before - count.traffic().num_collectives
    if num_missed:
        raise RuntimeError(f"{num_missed} collectives were not counted: they pass by the methods of process groups")


def _counted(method: Callable[..., Any], place: int, count: CollectiveCount) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if len(args) <= place:
            raise RuntimeError(f"{method.__name__} was called by keywords; its tensors cannot be told apart")
        count.add(args[place])
        return method(group, *args, **kwargs)

    return call


def _sequence_numbers() -> int:
    # torch's stubs do not know of the numbers.
    groups: Any = distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(_num_bytes(each) for each in tensors)
