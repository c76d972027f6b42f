"""Import torch lazily: a stand-in imports it when a computation first uses it.

Registries of algorithms can then be read, and settings be checked, without the second that the import takes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> object:
            import torch

            return getattr(torch, name)

    class _TensorType(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.Tensor)

    torch = _Torch()

    class Tensor(metaclass=_TensorType):
        """The type of tensors in annotations, and for isinstance."""


__all__ = ["Tensor", "torch"]
