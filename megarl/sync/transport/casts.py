"""Cast weights to bfloat16 or float8 before a weight sync, so that fewer bytes are sent at some loss of precision.

bfloat16 rounds to nearest. float8_e4m3 uses one scale s = 2^k per tensor: the smallest power of two with max |x| ≤ 448
s. A power of two is as precise as any other scale, and rarely changes between steps. Then x ≈ s · e4m3(x / s), with a
relative error of at most 2⁻⁴ where |x| ≥ 2⁻⁶ s.
"""

import math
from collections.abc import Mapping

import torch

from megarl.errors import NonFiniteError
from megarl.weights.families import ModelSpec
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.tables import Partition

SCALED = torch.float8_e4m3fn
# Float32 cannot divide by less.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(SCALED).max
_WHOLE = (Partition.REPLICATED, Partition.VOCAB)


def sent_specs(spec: ModelSpec, specs: Mapping[str, TensorSpec], dtype: str | None) -> dict[str, TensorSpec]:
    """Return name → shape and dtype in which each tensor is sent; dtype is `sync.dtype` (None: as it is).

    With bfloat16, all tensors are cast except those that are always float32. With float8_e4m3, only the matrices that
    tensor parallelism splits are cast. Vocabularies, norms, biases and routers are small or sensitive, and keep their
    dtype.
    """
    if dtype is None:
        return dict(specs)
    if dtype == "bfloat16":
        kept = spec.float32_tensors()
        return {
            name: each if name in kept else TensorSpec(shape=each.shape, dtype=torch.bfloat16)
            for name, each in specs.items()
        }
    matrices = {
        placed.name(tensor.sent_name)
        for placed in spec.rules()
        if placed.rule.partition not in _WHOLE
        for tensor in placed.rule.tensors
    }
    return {
        name: TensorSpec(shape=each.shape, dtype=SCALED) if name in matrices and len(each.shape) > 1 else each
        for name, each in specs.items()
    }


def scale_of(largest: float) -> float:
    """Return the float8 scale of a tensor, given its largest magnitude; 1 if the tensor is all zeros."""
    if largest == 0:
        return 1.0
    mantissa, exponent = math.frexp(largest / _LARGEST)
    scale = math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
    return max(scale, _SMALLEST_SCALE)


def largest_magnitude(name: str, view: torch.Tensor) -> float:
    """Compute max |x| of a part of the tensor `name`; NonFiniteError for what float8 cannot represent."""
    largest = float(view.detach().abs().amax()) if view.numel() else 0.0
    if not math.isfinite(largest):
        raise NonFiniteError(f"{name} has weights that are not finite, which sync.dtype=float8_e4m3 cannot send")
    return largest


def to_transport(view: torch.Tensor, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    """Cast weights to the dtype in which they are sent, after dividing them by `scale` if it is given."""
    if scale is not None:
        return view.float().div(scale).to(dtype)
    # `to` lets other threads in even if it has nothing to do, once per part.
    return view if view.dtype == dtype else view.to(dtype)


def from_transport(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Convert received float8 weights to float32, multiplied by their scale."""
    return tensor.float().mul_(scale)
