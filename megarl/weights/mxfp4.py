"""Read weights in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers of 4 bits with a power of two as scale.

A number is ±0, ½, 1, 1½, 2, 3, 4 or 6, times 2^(s − 127) for its block's byte s; s = 255 stands for NaN. A byte holds
two numbers, the first in its lower half. bfloat16 represents all of them exactly up to its largest exponent.
"""

import functools

import torch

BLOCKS, SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255


@functools.cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair of numbers of each byte, [256] of two bfloat16 in an int32, and each scale, [256] bfloat16."""
    numbers = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    scales = torch.ldexp(torch.ones(256, dtype=torch.float64), byte - _BIAS)
    scales[_NAN] = torch.nan
    return torch.stack([numbers[byte & 15], numbers[byte >> 4]], dim=1).view(torch.int32)[:, 0], scales.bfloat16()


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers [..., 32·G] in bfloat16 of blocks [..., G, 16] and scales [..., G], both bytes."""
    pairs, powers = _tables()
    numbers = pairs.index_select(0, blocks.reshape(-1).int()).view(torch.bfloat16).view(*scales.shape, -1)
    return numbers.mul_(powers.index_select(0, scales.reshape(-1).int()).view(*scales.shape, 1)).flatten(-2)
