"""Round weights as vLLM's online float8 methods do, and compute with them in the model's dtype.

vLLM asks these methods for the same layers as its own, so that vocabularies and routers stay as they are. Importing
this module makes them known to vLLM, where each has the name of vLLM's own method after `ROUNDED`.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant, weight_amax

from megarl.rollout.engine_spec import ROUNDED

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
_BLOCK = 128


def _to_float8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of `scale` that float8 has, in float32."""
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    return (weight.float() / scale).clamp(-_LARGEST, _LARGEST).to(FLOAT8).float() * scale


def per_tensor(weight: torch.Tensor, layer: LinearBase) -> torch.Tensor:
    """Round with one scale s per matrix, max |w| = 448 s over all tensor-parallel workers."""
    split = layer.input_size_per_partition != layer.input_size or layer.output_size_per_partition != layer.output_size
    largest = amax_for_tp_weight_quant(weight_amax(weight).reshape(1).float(), split)
    return _to_float8(weight, largest / _LARGEST)


def per_channel(weight: torch.Tensor, layer: LinearBase) -> torch.Tensor:
    """Round with one scale s per output, max |w| = 448 s over the output's inputs; s is at least 1 / (448 · 512)."""
    split = layer.input_size_per_partition != layer.input_size
    largest = amax_for_tp_weight_quant(weight_amax(weight, dim=-1, keepdim=True).float(), split)
    return _to_float8(weight, (largest / _LARGEST).clamp_min(1 / (_LARGEST * 512)))


def per_block(weight: torch.Tensor, _: LinearBase) -> torch.Tensor:
    """Round with one scale s per block of a worker's part, max |w| = 448 s there; max |w| counts as 1e-4 at least."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-4)
    return _to_float8(blocks, largest / _LARGEST).view_as(padded)[:rows, :columns]


class _RoundedLinear(UnquantizedLinearMethod):
    """A layer that computes with rounded weights; loading and every reload round them."""

    def __init__(self, rounding: Callable[[torch.Tensor, LinearBase], torch.Tensor]) -> None:
        super().__init__()
        self._round = rounding

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        layer.weight.data.copy_(self._round(layer.weight.data, layer))
        super().process_weights_after_loading(layer)


class _Rounded(QuantizationConfig):
    """The choice of the layers that are rounded, in the form that vLLM asks for."""

    name: ClassVar[str]
    rounding: ClassVar["staticmethod[[torch.Tensor, LinearBase], torch.Tensor]"]

    def get_name(self) -> str:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "_Rounded":
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> _RoundedLinear | None:
        return _RoundedLinear(type(self).rounding) if isinstance(layer, LinearBase) else None


@register_quantization_config(f"{ROUNDED}fp8_per_tensor")
class RoundedPerTensor(_Rounded):
    """Rounding with one scale per matrix."""

    name = f"{ROUNDED}fp8_per_tensor"
    rounding = staticmethod(per_tensor)


@register_quantization_config(f"{ROUNDED}fp8_per_channel")
class RoundedPerChannel(_Rounded):
    """Rounding with one scale per output."""

    name = f"{ROUNDED}fp8_per_channel"
    rounding = staticmethod(per_channel)


@register_quantization_config(f"{ROUNDED}fp8_per_block")
class RoundedPerBlock(_Rounded):
    """Rounding with one scale per block."""

    name = f"{ROUNDED}fp8_per_block"
    rounding = staticmethod(per_block)
