"""Weights from ranks to engine workers without a file: buckets of full tensors, summed over a group of all of them.

A rank writes the slices it owns into zeros, an engine's worker brings zeros, and the sum over the group is the bucket.
A byte has one owner, so the sum of integers is exact for every layout, and nobody needs to know who wrote what.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.device.platform import platform
from megarl.errors import WeightSyncError
from megarl.weights.safetensors_map import TensorSpec, plan_files
from megarl.weights.slices import Slice, store_slices

# What travels at a time; a larger tensor travels alone.
BUCKET_BYTES = 256 << 20
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the group's store is, which member a process becomes, of how many, and how long members wait."""

    address: str
    port: int
    rank: int
    size: int
    timeout_s: float


def open_store(address: str) -> dist.TCPStore:
    """The store at which a group meets, on a free port of this host; it lives as long as this object."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)


class WeightChannel:
    """A member of the group. All members send or receive the same tensors at the same time."""

    def __init__(self, meeting: Meeting, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        timeout = timedelta(seconds=meeting.timeout_s)
        store = dist.TCPStore(meeting.address, meeting.port, is_master=False, timeout=timeout)
        self._group = platform().new_group(store, meeting.rank, meeting.size, timeout)
        self._buckets = list(plan_files(specs, BUCKET_BYTES).values())
        self._device = device

    @torch.no_grad()
    def send(self, slices: Iterable[Slice]) -> None:
        """Contribute what this rank owns."""
        owned: dict[str, list[Slice]] = {}
        for part in slices:
            if part.owned:
                owned.setdefault(part.tensor, []).append(part)
        for bucket in self._buckets:
            data, tensors = _allocate(bucket, self._device)
            for name in bucket.keys() & owned.keys():
                store_slices(owned[name], tensors)
            self._sum(data)

    @torch.no_grad()
    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors, a bucket at a time; every bucket has memory of its own, so they may be kept."""
        for bucket in self._buckets:
            data, tensors = _allocate(bucket, self._device)
            self._sum(data)
            yield from tensors.items()

    def _sum(self, data: torch.Tensor) -> None:
        try:
            self._group.allreduce([data]).wait()
        except RuntimeError as error:
            # With its connections, or others would wait for this process.
            del self._group
            raise WeightSyncError(f"the group of trainer ranks and engine workers broke: {error}") from error


def _allocate(bucket: Mapping[str, TensorSpec], device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Zeros for a bucket as int64 [n], and its tensors as views of them."""
    starts, end = {}, 0
    for name, spec in bucket.items():
        starts[name] = end
        end += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT
    data = torch.zeros(end // _ALIGNMENT, dtype=torch.int64, device=device)
    raw = data.view(torch.uint8)
    return data, {
        name: raw[start : start + bucket[name].num_bytes].view(bucket[name].dtype).view(bucket[name].shape)
        for name, start in starts.items()
    }
