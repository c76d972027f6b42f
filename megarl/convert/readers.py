"""Read blocks of rows of Hugging Face tensors, either from safetensors files or from a torch_dist checkpoint, whose
elements are found by `weights.dist_index` and written without Megatron.
"""

import bisect
import functools
import io
import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.convert.files import FileReader, FileWindow, bytes_of
from megarl.convert.mapping import Parameter, RowBlock
from megarl.errors import DataError
from megarl.host.reading import reason_of
from megarl.weights.dist_index import METADATA, Chunk, StoredTensor
from megarl.weights.safetensors_headers import TensorHeader, model_files, read_header
from megarl.weights.safetensors_map import TensorSpec, spec_of
from megarl.weights.slices import turned

COMMON = "common.pt"
FORMAT_FILE = "metadata.json"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """The place in a file where a chunk's elements begin, in row-major order, after torch.save's header."""

    file: str
    offset: int


def find_record(reader: FileReader, chunk: Chunk, spec: TensorSpec) -> ChunkRecord:
    """Find where a chunk's elements begin in its file, from headers alone; DataError if the file lacks the chunk."""
    reader.check_range(chunk.file, chunk.offset, chunk.length)
    window = FileWindow(reader, chunk.file, chunk.offset, chunk.length)
    try:
        tensor = torch.load(cast(IO[bytes], window), map_location="meta", weights_only=True)
        with zipfile.ZipFile(window) as archive:
            (entry,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
        header = bytearray(_LOCAL_HEADER_BYTES)
        reader.read_into(chunk.file, chunk.offset + entry.header_offset, memoryview(header))
    except DataError:
        raise
    # Damaged bytes may raise any error in torch and zipfile.
    except Exception as error:
        raise DataError(
            f"{chunk.file}: no tensor at byte {chunk.offset} ({reason_of(error)}); copy the checkpoint again"
        ) from error
    found = TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype)
    if found != TensorSpec(shape=chunk.sizes, dtype=spec.dtype) or not tensor.is_contiguous():
        raise DataError(
            f"{chunk.file}: at byte {chunk.offset}: expected a contiguous tensor {chunk.sizes} of {spec.dtype}, got "
            f"{found.shape} of {found.dtype}; copy the checkpoint again"
        )
    names = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    start = entry.header_offset + _LOCAL_HEADER_BYTES + names + tensor.storage_offset() * spec.dtype.itemsize
    if start + found.num_bytes > chunk.length:
        raise DataError(f"{chunk.file}: the tensor at byte {chunk.offset} is cut short; copy the checkpoint again")
    return ChunkRecord(file=chunk.file, offset=chunk.offset + start)


class _Counter(io.RawIOBase):
    """A stream that counts the bytes written to it and discards them."""

    num_bytes = 0

    def write(self, data: Any) -> int:
        self.num_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes


@functools.cache
def saved_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the number of bytes that torch.save writes for a tensor of this shape and dtype, including its headers."""
    counter = _Counter()
    # Without checksums, torch.save does not touch the elements, so that no memory is committed for them.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], counter))
    finally:
        torch.serialization.set_crc32_options(before)
    return counter.num_bytes


@functools.cache
def empty_object() -> bytes:
    """Return the serialized `[None]`, which Megatron stores as the extra state of a layer that has only parameters."""
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream.getvalue()


def write_index(directory: Path, tensors: Mapping[str, StoredTensor], objects: Mapping[str, Chunk]) -> None:
    """Write the metadata files (.metadata, common.pt, metadata.json) that turn files of chunks into a checkpoint."""
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in tensors.items():
        stored[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.spec.dtype),
            size=torch.Size(tensor.spec.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks
            ],
        )
        for chunk in tensor.chunks:
            index = MetadataIndex(key, torch.Size(chunk.offsets))
            places[index] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
    for key, chunk in objects.items():
        stored[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
    metadata = Metadata(state_dict_metadata=stored, storage_data=places)
    (directory / METADATA).write_bytes(pickle.dumps(metadata))
    torch.save({"content_metadata": {"singleton_local_shards": False}}, directory / COMMON)
    (directory / FORMAT_FILE).write_text(json.dumps(_FORMAT), encoding="utf-8")


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
                view = turned(parameter.rule, whole)
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
