"""Memory-map safetensors files, to read slices or to let several processes fill slices of a preallocated file.

Checkpoints are loaded and exported in this format.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megarl.errors import ConfigError
from megarl.host.reading import read_object, reading
from megarl.weights.families import MODEL_REMEDY, ModelSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
UNTRAINED_NAME = "model-untrained.safetensors"
MAX_FILE_BYTES = 5 << 30

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of the name `float32`, `float16` or `bfloat16`."""
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The shape and dtype of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def locate_tensors(path: Path) -> dict[str, tuple[TensorSpec, int]]:
    """Return name → (shape and dtype, byte offset in the file) of a safetensors file's tensors, reading its header.

    Raises ConfigError unless every tensor has a known dtype and its bytes lie within the file.
    """
    found = {}
    with reading(path, "a safetensors file", remedy=MODEL_REMEDY, error=ConfigError), path.open("rb") as file:
        prefix, size = file.read(8), path.stat().st_size
        if len(prefix) < 8:
            raise ValueError(f"{len(prefix)} bytes")
        length = struct.unpack("<Q", prefix)[0]
        if length > size:
            raise ValueError(f"header of {length} bytes exceeds the file")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise ConfigError(
                    f"{path}: tensor {name} has type {entry['dtype']}, expected one of {sorted(_DTYPES)}; use "
                    "weights that are not quantised"
                )
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            if last > size:
                raise ConfigError(f"{path}: tensor {name} ends at byte {last} of {size}; {MODEL_REMEDY}")
            spec = TensorSpec(shape=tuple(entry["shape"]), dtype=_DTYPES[entry["dtype"]])
            if first < 8 + length or last - first != spec.num_bytes:
                has = f"{last - first} bytes, its shape {spec.num_bytes}"
                raise ConfigError(f"{path}: tensor {name} has {has}; {MODEL_REMEDY}")
            found[name] = spec, first
    return found


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """Return name → shape and dtype of a safetensors file's tensors, reading only its header."""
    return {name: spec for name, (spec, _) in locate_tensors(path).items()}


def map_tensors(path: Path, *, writable: bool = False) -> dict[str, torch.Tensor]:
    """Return name → memory-mapped tensor of a safetensors file. If `writable`, writing to a tensor changes the file."""
    located = locate_tensors(path)
    flat = torch.from_file(str(path), shared=writable, size=path.stat().st_size, dtype=torch.uint8)
    views = {}
    for name, (spec, begin) in located.items():
        raw = flat[begin : begin + spec.num_bytes]
        # Files of other writers may place data at unaligned offsets, of which torch can make no view: copy them.
        raw = raw.clone() if begin % spec.dtype.itemsize and not writable else raw
        views[name] = raw.view(spec.dtype).view(spec.shape)
    return views


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """A safetensors file to be written: its header bytes, its size, and where each tensor's data starts."""

    head: bytes
    num_bytes: int
    offsets: Mapping[str, int]


def file_layout(specs: Mapping[str, TensorSpec]) -> FileLayout:
    """Compute the layout of a safetensors file with these tensors, each aligned to its item size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Widest items first keeps every tensor aligned without gaps, which the format forbids.
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.num_bytes],
        }
        offset += spec.num_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = struct.pack("<Q", len(encoded)) + encoded
    offsets = {name: len(head) + header[name]["data_offsets"][0] for name in specs}
    return FileLayout(head=head, num_bytes=len(head) + offset, offsets=offsets)


def preallocate(file: Path, size: int) -> None:
    """Create a file of `size` zero bytes and reserve its disk space: a map to a full disk would kill its writer.

    Raises ConfigError if the disk is too full.
    """
    with file.open("wb") as stream:
        try:
            os.posix_fallocate(stream.fileno(), 0, max(1, size))
        except OSError as error:
            file.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot reserve {size / 2**30:.2f} GiB for {file}: {error.strerror}; free space there"
            ) from error


def create_file(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Create a safetensors file of zeros with reserved disk space. Raise ConfigError if the disk is too full."""
    layout = file_layout(specs)
    preallocate(path, layout.num_bytes)
    with path.open("r+b") as file:
        file.write(layout.head)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Write a safetensors file and return its tensors' shapes and dtypes. Raise ConfigError if the disk is too full."""
    specs = {name: TensorSpec(shape=tuple(each.shape), dtype=each.dtype) for name, each in tensors.items()}
    create_file(path, specs)
    target = map_tensors(path, writable=True)
    for name, tensor in tensors.items():
        target[name].copy_(tensor)
    return specs


def model_files(directory: Path) -> list[Path]:
    """List the safetensors files of a model directory. Raise ConfigError, naming the file, if one is missing."""
    weight_map = read_weight_map(directory)
    names = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
    if SINGLE_NAME not in names and os.path.lexists(directory / SINGLE_NAME):
        raise ConfigError(
            f"{directory}: has {SINGLE_NAME} beside the files of {INDEX_NAME}, and each program reads others; remove "
            "the old ones"
        )
    files = [directory / name for name in names]
    for file in files:
        if not os.path.lexists(file):
            raise ConfigError(f"model file {file} does not exist; expected {SINGLE_NAME} or the files of {INDEX_NAME}")
    return files


def read_weight_map(directory: Path) -> dict[str, str] | None:
    """Return tensor → file from a model's index file, or None without one. Raise ConfigError if it is damaged."""
    index = directory / INDEX_NAME
    if not os.path.lexists(index):
        return None
    weight_map = read_object(index, remedy=MODEL_REMEDY, error=ConfigError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index}: has no weight_map of tensors to files; {MODEL_REMEDY}")
    return weight_map


def check_tensors(
    directory: Path,
    expected: Mapping[str, Sequence[int]],
    *,
    ignored: Sequence[str] = (),
    optional: Sequence[str] = (),
    copies: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ConfigError, naming some differences, unless a checkpoint has tensors of the expected names and shapes.

    ignored: tensors that may be present, with any shape (see `not_expected`). optional: expected tensors that may be
    missing. copies: see `require_equal_copies`.
    """
    found = require_equal_copies(directory, copies)
    missing = sorted(expected.keys() - found.keys() - set(optional))
    unknown = not_expected(found, expected, ignored)
    if missing or unknown:
        raise ConfigError(
            f"{directory}: tensors do not match the family table: missing {missing[:3]} ({len(missing)}), "
            f"unknown {unknown[:3]} ({len(unknown)}); use an unmodified checkpoint of this architecture"
        )
    require_floats(directory, {name: found[name] for name in expected if name in found})
    for name, shape in expected.items():
        if name in found and found[name].shape != tuple(shape):
            raise ConfigError(f"{directory}: {name} has shape {found[name].shape}, config.json implies {tuple(shape)}")


def require_equal_copies(directory: Path, copies: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the shapes and dtypes of a model's tensors. Raise ConfigError if two of one name differ, or a copy from
    the tensor that it copies, since each program would read another one.

    copies: the names of tensors that embeddings tie to others, with the names of these.
    """
    files, homes, found = model_files(directory), dict[str, Path](), dict[str, TensorSpec]()
    for file in files:
        for name, spec in read_specs(file).items():
            if name in homes and not same_bytes(map_tensors(homes[name])[name], map_tensors(file)[name]):
                named = (read_weight_map(directory) or {}).get(name)
                raise ConfigError(
                    f"{directory}: tensor {name} is in {homes[name].name} and in {file.name}, and they differ; "
                    + (
                        f"{INDEX_NAME} names {named}, but programs read others: remove it from the other file"
                        if named
                        else MODEL_REMEDY
                    )
                )
            homes[name], found[name] = file, spec
    for name, source in copies.items():
        both = [map_tensors(homes[each])[each] for each in (name, source) if each in homes]
        if len(both) > 1 and not same_bytes(*both):
            raise ConfigError(
                f"{directory}: config.json says that {name} is {source} (tie_word_embeddings), but the files have one "
                f"that differs, which some programs would use; if the model was trained with it, set "
                f"tie_word_embeddings to false in config.json, else remove the tensor"
            )
    return found


def require_floats(directory: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Raise ConfigError if weights are stored as integers: those stand for others, by scales that nothing reads."""
    if packed := [name for name, spec in specs.items() if not spec.dtype.is_floating_point]:
        kind = str(specs[packed[0]].dtype).removeprefix("torch.")
        raise ConfigError(
            f"{directory}: {packed[0]} is stored as {kind} ({len(packed)} such tensors), as in quantised models, but "
            "config.json names no quantization_config; use the model's weights in bfloat16"
        )


def same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bytes."""
    alike = tensor.dtype == other.dtype and tensor.shape == other.shape
    return alike and torch.equal(tensor.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def not_expected(found: Iterable[str], expected: Iterable[str], ignored: Sequence[str]) -> list[str]:
    """Return the names found that are neither expected nor ignored; what ends in a dot in `ignored` is a prefix."""
    prefixes = tuple(name for name in ignored if name.endswith("."))
    rest = set(found).difference(expected, ignored)
    return sorted(name for name in rest if not name.startswith(prefixes))


def untrained_tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the tensors in a model's directory that exports have as they are, mapped to memory, or {} without any.

    A torch_dist checkpoint has them in a file of their own.
    """
    names = spec.untrained()
    if not names:
        return {}
    apart = spec.path / UNTRAINED_NAME
    if not apart.is_file() and (spec.path / ".metadata").is_file():
        # A checkpoint of a model that had none.
        return {}
    found = map_model([apart] if apart.is_file() else model_files(spec.path))
    beginnings = tuple(name for name in names if name.endswith("."))
    return {name: tensor for name, tensor in found.items() if name in names or name.startswith(beginnings)}


def plan_files(specs: Mapping[str, TensorSpec], max_bytes: int = MAX_FILE_BYTES) -> dict[str, dict[str, TensorSpec]]:
    """Distribute tensors, in order, to files of at most `max_bytes`; a larger tensor gets a file of its own."""
    groups: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if groups[-1] and filled + spec.num_bytes > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = spec
        filled += spec.num_bytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def model_index(plan: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, Any]:
    """Return the content of a model's index file (INDEX_NAME), given the result of `plan_files`."""
    return {
        "metadata": {"total_size": sum(spec.num_bytes for group in plan.values() for spec in group.values())},
        "weight_map": {tensor: name for name, group in plan.items() for tensor in group},
    }


def weight_specs(
    spec: ModelSpec, dtype: str, *, scalar_head: bool = False, by_expert: bool = False
) -> dict[str, TensorSpec]:
    """Return name → shape and dtype of all Hugging Face tensors of a model in `dtype`; some are always float32.

    scalar_head, by_expert: see `ModelSpec.expected_tensors`.
    """
    wide = spec.float32_tensors()
    return {
        name: TensorSpec(shape=shape, dtype=dtype_of("float32" if name in wide else dtype))
        for name, shape in spec.expected_tensors(scalar_head=scalar_head, by_expert=by_expert).items()
    }


def create_model_files(directory: Path, specs: Mapping[str, TensorSpec]) -> list[Path]:
    """Preallocate a model's safetensors files, and an index if there are several; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    plan = plan_files(specs)
    for name, group in plan.items():
        create_file(directory / name, group)
    if len(plan) > 1:
        (directory / INDEX_NAME).write_text(json.dumps(model_index(plan), indent=2), encoding="utf-8")
    return [directory / name for name in plan]


def map_model(files: Sequence[Path], *, writable: bool = False) -> dict[str, torch.Tensor]:
    """Return name → memory-mapped tensor of several safetensors files together."""
    views: dict[str, torch.Tensor] = {}
    for file in files:
        views |= map_tensors(file, writable=writable)
    return views
