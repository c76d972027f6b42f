"""Scale what attention and MLP add to the residual stream, as Granite does."""

from collections.abc import Callable

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class ScaledAdd:
    """The function residual + multiplier · x, which a layer calls as Megatron's bias-dropout-add."""

    def __init__(self, multiplier: float) -> None:
        self._multiplier = multiplier

    def __call__(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return self._add

    def _add(self, x_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        x, bias = x_with_bias
        assert bias is None
        assert dropout == 0
        return residual + x * self._multiplier


def scaled_residuals(block: TransformerBlockSubmodules, multiplier: float) -> TransformerBlockSubmodules:
    """Return a block's layers such that each multiplies what its attention and its MLP add to the residual stream."""
    for layer in block.layer_specs if multiplier != 1 else ():
        add = ModuleSpec(module=ScaledAdd, params={"multiplier": multiplier})
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = add
    return block
