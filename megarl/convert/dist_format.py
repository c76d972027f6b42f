"""Find the elements of torch_dist checkpoints (`weights.dist_index`), and write them, without Megatron."""

import functools
import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

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

from megarl.convert.files import FileReader, FileWindow
from megarl.errors import DataError
from megarl.host.reading import reason_of
from megarl.weights.dist_index import METADATA, Chunk, StoredTensor
from megarl.weights.safetensors_map import TensorSpec

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
