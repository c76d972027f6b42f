"""Plan conversions: compute the sizes of output files, and split them into pieces that can be written independently."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megarl.convert.mapping import Parameter, extra_state_keys
from megarl.convert.readers import empty_object, saved_size
from megarl.errors import DataError
from megarl.weights.dist_index import Chunk, StoredTensor
from megarl.weights.rules import WeightRule
from megarl.weights.safetensors_map import MAX_FILE_BYTES, TensorSpec, file_layout, plan_files

# The part of an output file that a worker holds at a time.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """An instruction to copy `num_rows` rows of a tensor, from `tensor_row` on, to row `row` of an output piece.

    unstack: these rows are part of a parameter that is one row of the tensor.
    """

    tensor: str
    tensor_row: int
    row: int
    num_rows: int
    unstack: "Unstack | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstack:
    """An instruction to turn a row, which is one expert, of a tensor with all experts into a parameter, and to take
    the parameter's rows from `row` on.
    """

    shape: tuple[int, ...]
    rule: WeightRule
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of rows of an output tensor: where its bytes go in a file, and which source rows to copy. Other rows are
    0.

    chunk_shape: the shape under which torch.save stores the rows; None: the file holds the elements without headers.
    """

    name: str
    file: str
    offset: int
    length: int
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...] | None = None
    source_dtype: torch.dtype
    dtype: torch.dtype
    copies: tuple[Copy, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of the piece's elements in the output dtype, without headers of the file format."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def source_bytes(self) -> int:
        """Return the size of the piece's elements in the source dtype, which is the read buffer it needs."""
        return math.prod(self.shape) * self.source_dtype.itemsize

    @property
    def unstack_bytes(self) -> int:
        """Return the size of an expert's row, and of the parameter that is made of it, if the piece has such a copy."""
        shapes = (copy.unstack.shape for copy in self.copies if copy.unstack is not None)
        return 2 * max(map(math.prod, shapes), default=0) * self.source_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file to preallocate; `fixed` lists (offset, bytes) known in advance, such as headers; pieces fill the rest."""

    name: str
    num_bytes: int
    fixed: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """The files and pieces of a conversion.

    hf_files: file → its tensors, if the output is a Hugging Face model. tensors, objects: by key, if it is torch_dist.
    """

    files: tuple[OutputFile, ...]
    pieces: tuple[Piece, ...]
    hf_files: Mapping[str, Mapping[str, TensorSpec]] = field(default_factory=dict)
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    objects: Mapping[str, Chunk] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the total size in bytes of the checkpoint that this plan writes, over all of its files."""
        return sum(file.num_bytes for file in self.files)


def plan_hf(
    source: Mapping[str, TensorSpec], specs: Mapping[str, TensorSpec], *, weight_map: Mapping[str, str] | None
) -> ConversionPlan:
    """Plan how to write a Hugging Face model: into the files of `weight_map`, or if its tensors differ, files of ≤ 5
    GiB.

    specs: the tensors to write, which may differ from those of the source only in their data type.
    """
    if weight_map and weight_map.keys() == specs.keys():
        groups: dict[str, dict[str, TensorSpec]] = {file: {} for file in sorted(set(weight_map.values()))}
        for name, spec in specs.items():
            groups[weight_map[name]][name] = spec
    else:
        groups = plan_files(specs)
    files, pieces = [], []
    for file, group in groups.items():
        layout = file_layout(group)
        files.append(OutputFile(name=file, num_bytes=layout.num_bytes, fixed=((0, layout.head),)))
        for name, spec in group.items():
            for row, num_rows in row_ranges(spec.shape, max(spec.dtype.itemsize, source[name].dtype.itemsize)):
                row_bytes = spec.num_bytes // spec.shape[0]
                pieces.append(
                    Piece(
                        name=name,
                        file=file,
                        offset=layout.offsets[name] + row * row_bytes,
                        length=num_rows * row_bytes,
                        shape=(num_rows, *spec.shape[1:]),
                        source_dtype=source[name].dtype,
                        dtype=spec.dtype,
                        copies=(Copy(tensor=name, tensor_row=row, row=0, num_rows=num_rows),),
                    )
                )
    return ConversionPlan(files=tuple(files), pieces=tuple(pieces), hf_files=groups)


def plan_dist(
    parameters: Sequence[Parameter], source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]
) -> ConversionPlan:
    """Plan the writing of a torch_dist checkpoint, in files of at most 5 GiB, with one chunk per piece.

    source, target: the Hugging Face tensors to read, and the same tensors with the dtypes to write.
    """
    packer = _Packer()
    pieces: list[Piece] = []
    chunks: dict[str, list[Chunk]] = {}
    specs: dict[str, TensorSpec] = {}
    for parameter in parameters:
        source_dtype = _common_dtype(parameter, source)
        spec = TensorSpec(shape=parameter.global_shape, dtype=_common_dtype(parameter, target))
        if specs.setdefault(parameter.key, spec) != spec:
            raise DataError(
                f"{parameter.key}: expected {specs[parameter.key].dtype}, the type of other layers, got {spec.dtype} "
                f"at {parameter.place}; convert with --dtype"
            )
        for row, num_rows in row_ranges(parameter.shape, max(spec.dtype.itemsize, source_dtype.itemsize)):
            shape = (num_rows, *parameter.shape[1:])
            chunk_shape = (1,) * len(parameter.stack) + shape
            offsets = (*parameter.place, row, *(0 for _ in shape[1:]))
            chunk = packer.place(saved_size(chunk_shape, spec.dtype), offsets=offsets, sizes=chunk_shape)
            chunks.setdefault(parameter.key, []).append(chunk)
            pieces.append(
                Piece(
                    name=f"{parameter.key}{list(parameter.place) if parameter.place else ''}",
                    file=chunk.file,
                    offset=chunk.offset,
                    length=chunk.length,
                    shape=shape,
                    chunk_shape=chunk_shape,
                    source_dtype=source_dtype,
                    dtype=spec.dtype,
                    copies=tuple(_copies(parameter, row, num_rows)),
                )
            )
    empty = empty_object()
    objects = {key: packer.place(len(empty), data=empty) for key in extra_state_keys(parameters)}
    return ConversionPlan(
        files=packer.files(),
        pieces=tuple(pieces),
        tensors={key: StoredTensor(spec=specs[key], chunks=tuple(found)) for key, found in chunks.items()},
        objects=objects,
    )


def _common_dtype(parameter: Parameter, source: Mapping[str, TensorSpec]) -> torch.dtype:
    """Return the dtype shared by all Hugging Face tensors that make up a parameter. Raise DataError if they differ."""
    found: dict[torch.dtype, str] = {}
    for block in parameter.blocks:
        found.setdefault(source[block.tensor].dtype, block.tensor)
    if len(found) > 1:
        (first, name), (second, other) = list(found.items())[:2]
        raise DataError(
            f"{other}: expected {first}, the type of {name}, got {second}; Megatron keeps both in {parameter.key}, so "
            f"convert with --dtype"
        )
    return next(iter(found))


def _copies(parameter: Parameter, row: int, num_rows: int) -> Iterator[Copy]:
    """Yield the source rows that make up rows [row, row + num_rows) of a Megatron parameter."""
    for block in parameter.blocks:
        start, stop = max(row, block.row), min(row + num_rows, block.row + block.num_rows)
        if start < stop:
            own = Unstack(shape=parameter.shape, rule=parameter.rule, row=start) if block.of_expert else None
            yield Copy(
                tensor=block.tensor,
                tensor_row=block.tensor_row + (0 if own else start - block.row),
                row=start - row,
                num_rows=stop - start,
                unstack=own,
            )


def row_ranges(shape: Sequence[int], item_bytes: int) -> Iterator[tuple[int, int]]:
    """Split a tensor into blocks of at most `PIECE_BYTES`, but at least one row; yield (first row, number of rows)."""
    step = max(1, PIECE_BYTES // (math.prod(shape[1:]) * item_bytes))
    yield from ((row, min(step, shape[0] - row)) for row in range(0, shape[0], step))


class _Packer:
    """The assignment of chunks, one after another, to files `__<n>_0.distcp` of at most `MAX_FILE_BYTES`."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {"__0_0.distcp": 0}
        self._fixed: dict[str, list[tuple[int, bytes]]] = {}

    def place(
        self, length: int, *, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = (), data: bytes | None = None
    ) -> Chunk:
        """Reserve the next `length` bytes of a file: for a chunk to be converted later, or for the given `data`."""
        file = next(reversed(self._sizes))
        if self._sizes[file] and self._sizes[file] + length > MAX_FILE_BYTES:
            file = f"__{len(self._sizes)}_0.distcp"
        start = self._sizes.setdefault(file, 0)
        self._sizes[file] += length
        if data is not None:
            self._fixed.setdefault(file, []).append((start, data))
        return Chunk(offsets=offsets, sizes=sizes, file=file, offset=start, length=length)

    def files(self) -> tuple[OutputFile, ...]:
        """Return the output files, with their sizes and the `data` placed in them."""
        return tuple(
            OutputFile(name=name, num_bytes=size, fixed=tuple(self._fixed.get(name, ())))
            for name, size in self._sizes.items()
        )
