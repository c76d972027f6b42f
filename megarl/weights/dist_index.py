"""Read the index of a checkpoint in Megatron's torch_dist format, and require all of its pickles to be plain data.

The format is that of torch.distributed.checkpoint. Each global tensor is stored as chunks (rectangular parts), each
written by `torch.save` into a `*.distcp` file. The pickle `.metadata` lists each chunk's rectangle, file and offset.
Unpickling may run any code, and a checkpoint may be somebody else's.
"""

import io
import pickle
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megarl.errors import DataError
from megarl.host.reading import reading
from megarl.weights.safetensors_map import TensorSpec

METADATA = ".metadata"
# Names that the pickle of a checkpoint's metadata may refer to; any other name could run code.
_ALLOWED: Mapping[str, Container[str]] = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A stored part of a global tensor: its rectangle (offsets, sizes), and where it lies: `length` bytes of `file`,
    from byte `offset` on, in the format of torch.save.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A global tensor of a torch_dist checkpoint: its full shape and dtype, and the chunks in which it is stored."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler for checkpoint metadata that accepts only a fixed list of classes, because others could run code."""

    def find_class(self, module: str, name: str) -> object:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(directory: Path) -> Metadata:
    """Read the metadata of a torch_dist checkpoint. Raises DataError for anything that is not plain data of its kind,
    and for chunks that lie outside of the directory.
    """
    file = directory / METADATA
    with reading(file, "the metadata of a torch_dist checkpoint"):
        metadata = cast(Metadata, _MetadataUnpickler(io.BytesIO(file.read_bytes())).load())
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"it places a chunk in {place.relative_path}, outside of the directory")
    return metadata


def read_index(directory: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return a checkpoint's global tensors by key, and the keys of stored objects that are not tensors."""
    metadata = read_metadata(directory)
    tensors, objects = {}, []
    with reading(directory / METADATA, "the metadata of a torch_dist checkpoint"):
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                chunks = [
                    Chunk(
                        offsets=tuple(each.offsets),
                        sizes=tuple(each.sizes),
                        file=place.relative_path,
                        offset=place.offset,
                        length=place.length,
                    )
                    for each in stored.chunks
                    for place in [metadata.storage_data[MetadataIndex(key, each.offsets)]]
                ]
                spec = TensorSpec(shape=tuple(stored.size), dtype=stored.properties.dtype)
                tensors[key] = StoredTensor(spec=spec, chunks=tuple(chunks))
            else:
                objects.append(key)
    return tensors, objects


def require_plain_data(checkpoint: Path) -> None:
    """Raise DataError if a pickle that loading a training checkpoint reads is more than plain data, which could run
    code: an index, an object that is stored among the chunks, or a `*.pt` file. Nothing in them is run.
    """
    # Also where the directory of a role is a link.
    for file in sorted([*checkpoint.glob("*.pt"), *checkpoint.glob("*/*.pt")]):
        with reading(file, "what torch.save wrote"):
            _require_plain(file, file.read_bytes())
    for index in sorted(checkpoint.glob(f"*/{METADATA}")):
        metadata = read_metadata(index.parent)
        with reading(index, "the metadata of a torch_dist checkpoint"):
            for key, place in metadata.storage_data.items():
                if not isinstance(metadata.state_dict_metadata.get(key.fqn), TensorStorageMetadata):
                    file = index.parent / place.relative_path
                    with reading(file, "chunks of a checkpoint"), file.open("rb") as stream:
                        stream.seek(place.offset)
                        _require_plain(file, stream.read(place.length))


def _require_plain(file: Path, saved: bytes) -> None:
    """Raise DataError unless torch reads these bytes of a file without unpickling more than data."""
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # The reason stands between torch's words about its options and about its documentation.
        reason = " ".join(str(error).strip().split("\n\n")[-2:][0].split())
        raise DataError(
            f"{file}: is more than data, and reading it could run code: {reason}; use another checkpoint, or copy this "
            "one again"
        ) from error
