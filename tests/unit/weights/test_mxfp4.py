"""Numbers of MXFP4 by hand, by the format's definition, and as transformers reads them."""

import math

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.weights.mxfp4 import dequantize

# Of a code's three lower bits: two of exponent, one of mantissa.
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_code_by_hand() -> None:
    # Byte i holds the codes i and 15 − i, the first in its lower half.
    blocks = torch.tensor([i | (15 - i) << 4 for i in range(16)], dtype=torch.uint8).view(1, 1, 16)
    (numbers,) = dequantize(blocks, torch.tensor([[128]], dtype=torch.uint8)).tolist()
    signed = [*MAGNITUDES, *(-each for each in MAGNITUDES)]
    expected = [2 * value for i in range(16) for value in (signed[i], signed[15 - i])]
    assert numbers == expected
    # Zeros have a sign as well: the codes 8, and 0 in the last byte's upper half.
    assert [math.copysign(1, numbers[i]) for i in (0, 15, 16, 31)] == [1, -1, -1, 1]


def test_scales_are_powers_of_two() -> None:
    """127 is 1; 255 is NaN; half of 2⁻¹²⁷ is below bfloat16's normal numbers, and exact."""
    scales = torch.tensor([0, 126, 127, 253, 255], dtype=torch.uint8).view(1, 5)
    ones_and_halves = torch.full((1, 5, 16), 0x12, dtype=torch.uint8)
    numbers = dequantize(ones_and_halves, scales).view(5, 32)
    assert numbers[:4, :2].tolist() == [[2.0**-127, 2.0**-128], [0.5, 0.25], [1.0, 0.5], [2.0**126, 2.0**125]]
    assert numbers[4].isnan().all()


def test_same_bits_as_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 253, (3, 10, 4), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales)
    got = dequantize(blocks, scales).transpose(1, 2).contiguous()
    assert (got.shape, got.dtype) == (expected.shape, torch.bfloat16) == ((3, 128, 10), torch.bfloat16)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
