"""Read the headers of safetensors files, and compare them with what config.json implies, before torch is loaded.

The reader of the package safetensors does not tell where in a file the bytes of a tensor are.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megarl.errors import ConfigError
from megarl.host.reading import MODEL_REMEDY, read_object, reading

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The name in torch of each type of the format, which ends with its bits.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES |= {"I64": "int64", "I32": "int32", "U8": "uint8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """A tensor in a file: the name in torch of its type, its shape, and where in the file its bytes begin and end."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def equals(self, other: "TensorHeader") -> bool:
        """Return whether both have the same type, shape and bytes, which are read."""
        a, b = (np.memmap(each.file, np.uint8, "r")[each.begin : each.end] for each in (self, other))
        return self.dtype == other.dtype and self.shape == other.shape and np.array_equal(a, b)


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a safetensors file by name, reading its header.

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
            if entry["dtype"] not in DTYPES:
                raise ConfigError(
                    f"{path}: tensor {name} has type {entry['dtype']}, expected one of {sorted(DTYPES)}; use "
                    "weights that are not quantised"
                )
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if end > size:
                raise ConfigError(f"{path}: tensor {name} ends at byte {end} of {size}; {MODEL_REMEDY}")
            shape, bits = tuple(entry["shape"]), int(entry["dtype"].lstrip("BFIU"))
            if begin < 8 + length or end - begin != (implied := math.prod(shape) * bits // 8):
                raise ConfigError(f"{path}: tensor {name} has {end - begin} bytes, its shape {implied}; {MODEL_REMEDY}")
            found[name] = TensorHeader(file=path, dtype=DTYPES[entry["dtype"]], shape=shape, begin=begin, end=end)
    return found


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
    require_floats(directory, {name: found[name].dtype for name in expected if name in found})
    for name, shape in expected.items():
        if name in found and found[name].shape != tuple(shape):
            raise ConfigError(f"{directory}: {name} has shape {found[name].shape}, config.json implies {tuple(shape)}")


def require_equal_copies(directory: Path, copies: Mapping[str, str]) -> dict[str, TensorHeader]:
    """Return a model's tensors by name. Raise ConfigError if two of one name differ, or a copy from the tensor that it
    copies, since each program would read another one.

    copies: the names of tensors that embeddings tie to others, with the names of these.
    """
    found = dict[str, TensorHeader]()
    for file in model_files(directory):
        for name, tensor in read_header(file).items():
            if name in found and not found[name].equals(tensor):
                remedy = MODEL_REMEDY
                if named := (read_weight_map(directory) or {}).get(name):
                    remedy = f"{INDEX_NAME} names {named}, but programs read others: remove it from the other file"
                both = f"{found[name].file.name} and in {file.name}"
                raise ConfigError(f"{directory}: tensor {name} is in {both}, and they differ; {remedy}")
            found[name] = tensor
    for name, source in copies.items():
        if name in found and source in found and not found[name].equals(found[source]):
            raise ConfigError(
                f"{directory}: config.json says that {name} is {source} (tie_word_embeddings), but the files have one "
                f"that differs, which some programs would use; if the model was trained with it, set "
                f"tie_word_embeddings to false in config.json, else remove the tensor"
            )
    return found


def require_floats(directory: Path, dtypes: Mapping[str, str]) -> None:
    """Raise ConfigError if weights are stored as integers: those stand for others, by scales that nothing reads."""
    if packed := [name for name, dtype in dtypes.items() if "float" not in dtype]:
        raise ConfigError(
            f"{directory}: {packed[0]} is stored as {dtypes[packed[0]]} ({len(packed)} such tensors), as in quantised "
            "models, but config.json names no quantization_config; use the model's weights in bfloat16"
        )


def not_expected(found: Iterable[str], expected: Iterable[str], ignored: Sequence[str]) -> list[str]:
    """Return the names found that are neither expected nor ignored; what ends in a dot in `ignored` is a prefix."""
    prefixes = tuple(name for name in ignored if name.endswith("."))
    rest = set(found).difference(expected, ignored)
    return sorted(name for name in rest if not name.startswith(prefixes))
