"""Read blocks of rows of Hugging Face tensors, either from safetensors files or from a torch_dist checkpoint."""

import bisect
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from megarl.convert.dist_format import find_record
from megarl.convert.files import FileReader, bytes_of
from megarl.convert.mapping import Parameter, RowBlock
from megarl.errors import DataError
from megarl.weights.dist_index import Chunk, StoredTensor
from megarl.weights.safetensors_headers import TensorHeader, model_files, read_header
from megarl.weights.safetensors_map import TensorSpec, spec_of
from megarl.weights.slices import turned

# Size of the cache of chunk headers, which are read when a chunk is first needed.
_KNOWN_RECORDS = 1024


class SafetensorsReader:
    """A reader of the tensors in the safetensors files of a Hugging Face directory.

    `found`: all tensors of the files. `specs`: those that belong to the model. `files` counts the bytes that were read.
    """

    def __init__(self, path: Path) -> None:
        self.files = FileReader(path)
        self._stored: dict[str, TensorHeader] = {}
        for file in model_files(path):
            for name, stored in read_header(file).items():
                if name in self._stored:
                    raise DataError(f"{file}: {name} is also in {self._stored[name].file.name}; copy the model again")
                self._stored[name] = stored
        self.found = {name: spec_of(stored) for name, stored in self._stored.items()}
        self.specs: Mapping[str, TensorSpec] = self.found

    def read(self, name: str, row: int, out: torch.Tensor) -> None:
        """Fill `out` [rows, ...] with rows of the tensor `name`, as wide as those of `out`, starting at `row`."""
        stored, row_bytes = self._stored[name], out.nbytes // len(out)
        self.files.read_into(stored.file.name, stored.begin + row * row_bytes, bytes_of(out))


class DistReader:
    """A reader of Hugging Face tensors from a torch_dist checkpoint, whatever parallel layout wrote it.

    `specs`: the shapes and dtypes of the Hugging Face tensors. `files` counts the bytes that were read.
    """

    def __init__(
        self,
        path: Path,
        stored: Mapping[str, StoredTensor],
        parameters: Sequence[Parameter],
        shapes: Mapping[str, Sequence[int]],
    ) -> None:
        self.files, self._stored = FileReader(path), stored
        self._record = functools.lru_cache(maxsize=_KNOWN_RECORDS)(functools.partial(find_record, self.files))
        self._chunks: dict[tuple[str, tuple[int, ...]], list[Chunk]] = {}
        for key, num_axes in {parameter.key: len(parameter.stack) for parameter in parameters}.items():
            for chunk in stored[key].chunks:
                self._chunks.setdefault((key, chunk.offsets[:num_axes]), []).append(chunk)
        self._blocks: dict[str, list[tuple[Parameter, RowBlock]]] = {}
        for parameter in parameters:
            for block in parameter.blocks:
                self._blocks.setdefault(block.tensor, []).append((parameter, block))
        for blocks in self._blocks.values():
            blocks.sort(key=lambda pair: pair[1].tensor_row)
        self.specs: dict[str, TensorSpec] = {}
        for name, shape in shapes.items():
            parameter, _ = self._blocks[name][0]
            self.specs[name] = TensorSpec(shape=tuple(shape), dtype=stored[parameter.key].spec.dtype)

    def check_records(self) -> None:
        """Raise DataError unless every chunk is in its file where the metadata says; only headers are read."""
        for (key, _), chunks in self._chunks.items():
            for chunk in chunks:
                find_record(self.files, chunk, self._stored[key].spec)

    def read(self, name: str, row: int, out: torch.Tensor) -> None:
        """Fill `out` [rows, ...] with rows of the Hugging Face tensor `name`, starting at `row`."""
        blocks = self._blocks[name]
        if not blocks[0][1].of_expert:
            # Blocks of a tensor of all experts count the rows of each.
            rows = out.view(-1, *blocks[0][0].shape[1:])
            row, out = row * (len(rows) // len(out)), rows
        end = row + len(out)
        first = bisect.bisect_right(blocks, row, key=lambda pair: pair[1].tensor_row) - 1
        for parameter, block in blocks[first:]:
            if block.tensor_row >= end:
                break
            if block.of_expert:
                whole = torch.empty(parameter.shape, dtype=out.dtype)
                self._read_parameter(parameter, 0, whole)
                view = turned(parameter.partition, whole)
                out[block.tensor_row - row].view(view.shape).copy_(view)
                continue
            start, stop = max(row, block.tensor_row), min(end, block.tensor_row + block.num_rows)
            self._read_parameter(parameter, block.row + start - block.tensor_row, out[start - row : stop - row])

    def _read_parameter(self, parameter: Parameter, row: int, out: torch.Tensor) -> None:
        """Fill `out` with rows of a Megatron parameter, from `row` on, from every stored chunk that overlaps them."""
        num_axes, covered = len(parameter.stack), 0
        spec = self._stored[parameter.key].spec
        for chunk in self._chunks.get((parameter.key, parameter.place), ()):
            offsets, sizes = chunk.offsets[num_axes:], chunk.sizes[num_axes:]
            start, stop = max(row, offsets[0]), min(row + len(out), offsets[0] + sizes[0])
            if start >= stop:
                continue
            columns = tuple(slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True))
            target = out[(slice(start - row, stop - row), *columns)]
            record, row_bytes = self._record(chunk, spec), spec.dtype.itemsize
            for size in sizes[1:]:
                row_bytes *= size
            whole = target if target.is_contiguous() else torch.empty(target.shape, dtype=out.dtype)
            self.files.read_into(record.file, record.offset + (start - offsets[0]) * row_bytes, bytes_of(whole))
            if whole is not target:
                target.copy_(whole)
            covered += target.numel()
        if covered != out.numel():
            raise DataError(
                f"{parameter.key}: chunks hold {covered} of the {out.numel()} elements of {parameter.place} from row "
                f"{row}; copy the checkpoint again"
            )


TensorReader: TypeAlias = SafetensorsReader | DistReader
