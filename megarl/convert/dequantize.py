"""Read checkpoints whose experts are in MXFP4, such as gpt-oss as published, as if they were in bfloat16."""

from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.convert.readers import SafetensorsReader
from megarl.errors import DataError
from megarl.weights.mxfp4 import BLOCKS, SCALES, dequantize
from megarl.weights.safetensors_map import TensorSpec

# How config.json names the format.
MXFP4 = "mxfp4"


class Mxfp4Reader(SafetensorsReader):
    """A reader of a Hugging Face directory that turns MXFP4 into bfloat16, one expert at a time.

    Blocks [experts, out, in/32, 16] and scales [experts, out, in/32] make up a tensor [experts, in, out].
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._specs = self.found
        self._packed = dict(self._find_packed(path))
        parts = {name + suffix for name in self._packed for suffix in (BLOCKS, SCALES)}
        self.found = {name: spec for name, spec in self._specs.items() if name not in parts} | self._packed
        self.specs = self.found

    def _find_packed(self, path: Path) -> Iterator[tuple[str, TensorSpec]]:
        for blocks in (name for name in self._specs if name.endswith(BLOCKS)):
            name = blocks.removesuffix(BLOCKS)
            shape, scales = self._specs[blocks].shape, self._specs.get(name + SCALES)
            if scales is None or scales.dtype != torch.uint8 or (*scales.shape, 16) != shape or len(shape) != 4:
                raise DataError(
                    f"{path}: {blocks}: got shape {shape}, expected [experts, out, in/32, 16] of bytes, and {name}"
                    f"{SCALES} without the last axis, got {scales and scales.shape}; copy the model again"
                )
            num_experts, rows, groups, _ = shape
            yield name, TensorSpec(shape=(num_experts, 32 * groups, rows), dtype=torch.bfloat16)

    def read(self, name: str, row: int, out: torch.Tensor) -> None:
        """Fill `out` [rows, ...] with rows of the tensor `name`, starting at `row`; of experts, a row is an expert."""
        if name not in self._packed:
            super().read(name, row, out)
            return
        for i, expert in enumerate(out, start=row):
            parts = []
            for suffix in (BLOCKS, SCALES):
                parts.append(torch.empty((1, *self._stored[name + suffix].shape[1:]), dtype=torch.uint8))
                super().read(name + suffix, i, parts[-1])
            expert.copy_(dequantize(*parts)[0].T)
