"""Cast weights to narrower types for sending, at some loss of precision.

bfloat16 is rounded to the nearest. float8_e4m3 has one scale s = 2^k per tensor, the smallest power of two with
max |x| ≤ 448 s: a power of two costs no precision beside any other scale, and stays the same from step to step.
Then x ≈ s · e4m3(x / s), with a relative error of at most 2⁻⁴ where |x| ≥ 2⁻⁶ s.
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
_MATRICES = (Partition.ROWS, Partition.COLUMNS, Partition.GATE_UP, Partition.QKV)


def wire_specs(spec: ModelSpec, specs: Mapping[str, TensorSpec], dtype: str | None) -> dict[str, TensorSpec]:
    """Return for each tensor the dtype in which it is sent under `sync.dtype`.

    bfloat16 is for all tensors but those that are in float32 whatever the model's type. float8_e4m3 is only for the
    matrices that tensor parallelism splits: vocabularies, norms, biases and routers are small or sensitive, and keep
    their type.
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
        placed.name(tensor.name)
        for placed in spec.rules()
        if placed.rule.partition in _MATRICES
        for tensor in placed.rule.tensors
    }
    return {
        name: TensorSpec(shape=each.shape, dtype=SCALED) if name in matrices and len(each.shape) > 1 else each
        for name, each in specs.items()
    }


def scale_of(largest: float) -> float:
    """Return the scale of a tensor whose largest magnitude is given; 1 if the tensor is all zeros."""
    if largest == 0:
        return 1.0
    mantissa, exponent = math.frexp(largest / _LARGEST)
    scale = math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
    return max(scale, _SMALLEST_SCALE)


def largest_magnitude(name: str, view: torch.Tensor) -> float:
    """Compute max |x| of a part of a tensor.

    Raises:
        NonFiniteError: it is NaN or infinite, which no scale covers.
    """
    largest = float(view.detach().abs().amax()) if view.numel() else 0.0
    if not math.isfinite(largest):
        raise NonFiniteError(f"{name} has weights that are not finite, which sync.dtype=float8_e4m3 cannot send")
    return largest


def to_wire(view: torch.Tensor, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    """Cast elements to the dtype in which they are sent, after dividing them by `scale` if there is one."""
    if scale is not None:
        return view.float().div(scale).to(dtype)
    # `to` lets other threads in even if it has nothing to do, once per part.
    return view if view.dtype == dtype else view.to(dtype)


def from_wire(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Turn scaled elements back into float32."""
    return tensor.float().mul_(scale)
