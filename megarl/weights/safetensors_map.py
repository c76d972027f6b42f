"""Memory-map safetensors files, to read slices or to let several processes fill slices of a preallocated file.

Checkpoints are loaded and exported in this format.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.torch_later import Tensor, torch
from megarl.errors import ConfigError
from megarl.weights.families import ModelSpec
from megarl.weights.safetensors_headers import DTYPES, INDEX_NAME, SINGLE_NAME, TensorHeader, model_files, read_header

UNTRAINED_NAME = "model-untrained.safetensors"
MAX_FILE_BYTES = 5 << 30

_NAMES = {f"torch.{dtype}": name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The shape and dtype of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def spec_of(stored: TensorHeader) -> TensorSpec:
    """Return the shape and dtype of a tensor in a file."""
    return TensorSpec(shape=stored.shape, dtype=getattr(torch, stored.dtype))


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """Return name → shape and dtype of a safetensors file's tensors, reading only its header."""
    return {name: spec_of(stored) for name, stored in read_header(path).items()}


def map_tensors(path: Path, *, writable: bool = False) -> dict[str, Tensor]:
    """Return name → memory-mapped tensor of a safetensors file. If `writable`, writing to a tensor changes the file."""
    stored = read_header(path)
    flat = torch.from_file(str(path), shared=writable, size=path.stat().st_size, dtype=torch.uint8)
    views = {}
    for name, each in stored.items():
        raw, dtype = flat[each.begin : each.end], getattr(torch, each.dtype)
        # Files of other writers may place data at unaligned offsets, of which torch can make no view: copy them.
        raw = raw.clone() if each.begin % dtype.itemsize and not writable else raw
        views[name] = raw.view(dtype).view(each.shape)
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
            "dtype": _NAMES[str(spec.dtype)],
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
    """Create a file of `size` bytes with its space, or raise ConfigError: maps to full disks kill their writers."""
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Write a safetensors file and return its tensors' shapes and dtypes. Raise ConfigError if the disk is too full."""
    specs = {name: TensorSpec(shape=tuple(each.shape), dtype=each.dtype) for name, each in tensors.items()}
    create_file(path, specs)
    target = map_tensors(path, writable=True)
    for name, tensor in tensors.items():
        target[name].copy_(tensor)
    return specs


def same_bytes(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bytes."""
    alike = tensor.dtype == other.dtype and tensor.shape == other.shape
    return alike and torch.equal(tensor.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def untrained_tensors(spec: ModelSpec) -> dict[str, Tensor]:
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


def model_index(plan: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, object]:
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
        name: TensorSpec(shape=shape, dtype=getattr(torch, "float32" if name in wide else dtype))
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


def map_model(files: Sequence[Path], *, writable: bool = False) -> dict[str, Tensor]:
    """Return name → memory-mapped tensor of several safetensors files together."""
    views: dict[str, Tensor] = {}
    for file in files:
        views |= map_tensors(file, writable=writable)
    return views
