"""Weights rounded to float8, by hand: e4m3 has 3 bits after the point, and steps of 2⁻⁹ below 2⁻⁶."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch


# The functions import vLLM, which every process of a parallel session would pay for: all of them collect this file.
def rounding(name: str) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = getattr(importlib.import_module("megarl.rollout.rounded_weights"), name)
    return function


# A layer that no tensor parallelism splits.
WHOLE = SimpleNamespace(input_size=4, input_size_per_partition=4, output_size=2, output_size_per_partition=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_tensor(dtype: torch.dtype) -> None:
    """The largest, 896, makes the scale 2: values are rounded to 2 × {…, 16, 18, 20, …} and 2 × multiples of 2⁻⁹."""
    weight = torch.tensor([[896.0, 33.0, -35.0, 0.0], [1.0, 0.0078125, 0.005, -896.0]], dtype=dtype)
    # 33 / 2 = 16.5 and 17.5: ties between 16, 18 go to the even last bit. 0.0025 is 1.28 steps of 2⁻⁹.
    expected = torch.tensor([[896.0, 32.0, -36.0, 0.0], [1.0, 0.0078125, 0.00390625, -896.0]])
    assert torch.equal(rounding("per_tensor")(weight, WHOLE), expected)


def test_per_channel() -> None:
    """Each row has a scale of its own: 2, and 2⁻¹⁰."""
    weight = torch.tensor([[896.0, 33.0, 1.0, 0.005], [0.4375, 0.005, 0.25, -0.1]])
    # 0.005 · 1024 = 5.12 lies between 5 and 5.5; 0.1 · 1024 = 102.4 between 96 and 104.
    second = [0.4375, 5 / 1024, 0.25, -104 / 1024]
    assert torch.equal(rounding("per_channel")(weight, WHOLE), torch.tensor([[896.0, 32.0, 1.0, 0.00390625], second]))


def test_per_block() -> None:
    """130 × 130 are four blocks, the last of which has 2 × 2; scales are 2, 1, 1 and 2⁻¹⁰."""
    weight = torch.ones(130, 130)
    weight[0, 0], weight[0, 128], weight[128, 0] = 896.0, 448.0, -448.0
    weight[1, 1], weight[1, 129], weight[129, 1] = 33.0, 33.0, 33.0
    weight[128:, 128:] = torch.tensor([[0.4375, 0.005], [0.25, -0.1]])
    rounded = rounding("per_block")(weight, WHOLE)
    # 33 / 1 lies between 32 and 36.
    assert (rounded[1, 1], rounded[1, 129], rounded[129, 1]) == (32.0, 32.0, 32.0)
    assert (rounded[0, 0], rounded[0, 128], rounded[128, 0], rounded[5, 5]) == (896.0, 448.0, -448.0, 1.0)
    assert torch.equal(rounded[128:, 128:], torch.tensor([[0.4375, 5 / 1024], [0.25, -104 / 1024]]))


def test_zeros_stay_zeros() -> None:
    for name in ("per_tensor", "per_channel", "per_block"):
        assert torch.equal(rounding(name)(torch.zeros(2, 4), WHOLE), torch.zeros(2, 4))


def test_scales_are_those_of_vllms_own_methods() -> None:
    """Its casts in plain torch, for random weights."""
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = torch.randn(192, 160, generator=torch.Generator().manual_seed(0))
    scale = fp8._fp8_channel_scale(weight.abs().amax(-1, keepdim=True))
    channel = fp8._fp8_quant_per_channel(weight, scale).float() * scale
    assert torch.equal(rounding("per_channel")(weight, WHOLE), channel)
    values, scales = per_block_cast_to_fp8(weight, [128, 128])
    spread = scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :160]
    torch.testing.assert_close(rounding("per_block")(weight, WHOLE), values.float() * spread, rtol=2**-3, atol=0)
    close = (rounding("per_block")(weight, WHOLE) - values.float() * spread).abs() <= 1e-6 * weight.abs()
    assert close.float().mean() > 0.999
