"""Moves a role's memory between its device and the host: parameters, gradient buffers, optimizer state.

Megatron keeps parameters and gradients as views of large buffers, and main parameters as views of those again. So
storages are moved, not tensors: a storage's bytes are copied to the host and the storage is resized to nothing;
bringing it back allocates and fills it, and every view of it is valid as before. Bits do not change.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megarl.device.platform import platform
from megarl.parallel.roles import LoadedRole
from megarl.types.messages import Part


@dataclass(frozen=True, slots=True)
class _HostCopy:
    storage: torch.UntypedStorage
    content: torch.Tensor


class Offloader:
    """Keeps what of a role is on the host."""

    def __init__(self, role: LoadedRole) -> None:
        self._role = role
        self._copies: dict[Part, list[_HostCopy]] = {}

    def offload(self, parts: Iterable[Part]) -> int:
        """Move parts to the host; those that are there stay. Returns the bytes that the device got back."""
        released = 0
        for part in set(parts) - self._copies.keys():
            storages = list(self._storages(part))
            before = _num_bytes(storages)
            self._copies[part] = [_HostCopy(storage, _to_host(storage)) for storage in storages]
            for storage in storages:
                storage.resize_(0)
            released += before - _num_bytes(storages)
        platform().release_cached_memory()
        return released

    def onload(self, parts: Iterable[Part]) -> None:
        """Bring parts back; those that are on the device stay."""
        for part in set(parts) & self._copies.keys():
            for copy in self._copies.pop(part):
                copy.storage.resize_(len(copy.content))
                _bytes_of(copy.storage).copy_(copy.content)

    def require(self, *parts: Part) -> None:
        """Refuse to compute with what is on the host: kernels would read freed memory."""
        missing = [part for part in parts if part in self._copies]
        assert not missing, f"the {self._role.spec.role}'s {', '.join(missing)} are offloaded; onload them first"

    def _storages(self, part: Part) -> Iterator[torch.UntypedStorage]:
        """The storages of a part, each once. One that several parts view belongs to the first of them."""
        earlier = itertools.takewhile(lambda other: other is not part, Part)
        taken = {t.untyped_storage()._cdata for other in earlier for t in _tensors(self._role, other)}
        for tensor in _tensors(self._role, part):
            storage = tensor.untyped_storage()
            if storage._cdata not in taken:
                taken.add(storage._cdata)
                yield storage


def _tensors(role: LoadedRole, part: Part) -> Iterator[torch.Tensor]:
    """Tensors that hold a part's memory; several may be views of one storage."""
    if part is Part.PARAMS:
        for chunk in role.chunks:
            yield from chunk.parameters()
    elif part is Part.GRADS:
        for ddp in role.ddp:
            yield from (buffer.grad_data for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers))
    elif role.optimizer is not None:
        for optimizer in _torch_optimizers(role.optimizer):
            # Under float32 these are views of the parameters; under bfloat16 they are main parameters.
            yield from (param for group in optimizer.param_groups for param in group["params"])
            states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
            yield from (value for value in states if isinstance(value, torch.Tensor))


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers inside Megatron's, which may be a chain of them and empty on a rank without parameters."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each.optimizer is not None:
            yield each.optimizer


def _num_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[n] uint8, a view of a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    return platform().host_buffer(storage.nbytes()).copy_(_bytes_of(storage))
