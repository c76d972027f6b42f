"""Move a role's memory (parameters, gradient buffers, optimizer state) between its device and the host.

In Megatron, parameters and gradients are views of large buffers, and main parameters may be views too. So whole
storages are moved, not tensors. Offloading copies a storage's bytes to the host and resizes the storage to 0; onloading
resizes it back and copies the bytes to it. All views are then valid again, with the same bits.

Gradients are copied only while they wait for an optimizer step: otherwise nothing reads them, and the next update
begins by setting them to zero. Host buffers are kept and used again, because page-locking memory takes longer than
copying to it.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megarl.host.device.platform import platform
from megarl.parallel.roles import Gradients, LoadedRole
from megarl.types.messages import Part


@dataclass(frozen=True, slots=True)
class _Freed:
    """A torch storage whose device memory is freed; its size in bytes; its copy on the host, unless dropped."""

    storage: torch.UntypedStorage
    num_bytes: int
    content: torch.Tensor | None


class Offloader:
    """Moves one role's memory (parameters, gradients, optimizer) between device and host, and knows what is where."""

    def __init__(self, role: LoadedRole) -> None:
        self._role = role
        self._freed: dict[Part, list[_Freed]] = {}
        # Host buffers of each part by the keys of storages, which resizing does not change.
        self._buffers: dict[Part, dict[int, torch.Tensor]] = {}

    def offload(self, parts: Iterable[Part]) -> int:
        """Move parts of the role's memory to the host, unless they are there; return the device bytes freed."""
        self._role.settle()
        released = 0
        for part in set(parts) - self._freed.keys():
            # A storage that several parts view belongs to the first of them.
            earlier = list(Part)[: list(Part).index(part)]
            taken = {t.untyped_storage()._cdata for other in earlier for t in _tensors(self._role, other)}
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in _tensors(self._role, part)}
            old, buffers = self._buffers.get(part, {}), dict[int, torch.Tensor]()
            freed, self._buffers[part] = self._freed.setdefault(part, []), buffers
            for key, storage in storages.items():
                if key not in taken:
                    num_bytes, content = storage.nbytes(), None
                    if part is not Part.GRADS or self._role.gradients is not Gradients.NONE:
                        content = old.get(key)
                        if content is None or len(content) != num_bytes:
                            content = platform().host_buffer(num_bytes)
                        buffers[key] = content.copy_(_bytes_of(storage))
                    freed.append(_Freed(storage, num_bytes, content))
                    storage.resize_(0)
                    released += num_bytes - storage.nbytes()
        platform().release_cached_memory()
        return released

    def onload(self, parts: Iterable[Part]) -> None:
        """Move parts of the role's memory back to the device, unless they are there. Gradients that were not copied
        come back as zeros.
        """
        for part in set(parts) & self._freed.keys():
            for each in self._freed.pop(part):
                each.storage.resize_(each.num_bytes)
                content = _bytes_of(each.storage)
                if each.content is None:
                    content.zero_()
                else:
                    content.copy_(each.content)

    @property
    def is_empty(self) -> bool:
        """Return whether all of the role's memory is on the host."""
        return all(part in self._freed or next(_tensors(self._role, part), None) is None for part in Part)

    def require(self, *parts: Part) -> None:
        """Raise AssertionError if one of the given parts is on the host, because kernels would read freed memory."""
        missing = [part for part in parts if part in self._freed]
        assert not missing, f"the {self._role.spec.role}'s {', '.join(missing)} are offloaded; onload them first"


def _tensors(role: LoadedRole, part: Part) -> Iterator[torch.Tensor]:
    """Yield the tensors that make up a part of a role's memory. Several of them may be views of one storage."""
    if part is Part.PARAMS:
        frozen = role.base.chunks if role.base is not None else ()
        shared = {each.untyped_storage()._cdata for chunk in frozen for each in chunk.parameters()}
        for chunk in role.chunks:
            yield from (each for each in chunk.parameters() if each.untyped_storage()._cdata not in shared)
        for values in () if role.average is None else role.average.values:
            yield from values.values()
    elif part is Part.GRADS:
        for ddp in role.ddp:
            yield from (buffer.grad_data for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers))
    elif role.optimizer is not None:
        # Megatron's optimizer may be a chain of torch optimizers, with None on a rank without parameters.
        chain = (each.optimizer for each in getattr(role.optimizer, "chained_optimizers", [role.optimizer]))
        for optimizer in (each for each in chain if each is not None):
            # Under float32 these are views of the parameters; under bfloat16 they are main parameters.
            yield from (param for group in optimizer.param_groups for param in group["params"])
            states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
            # The hybrid optimizer's are on the host already, in part.
            here = platform().device().type
            yield from (value for value in states if isinstance(value, torch.Tensor) and value.device.type == here)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of a whole storage as a uint8 tensor [n]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
