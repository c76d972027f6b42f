"""Open checkpoints (Hugging Face or torch_dist), and check that they have the tensors that config.json implies.

Checkpoints whose experts are in MXFP4, such as gpt-oss as published, are read as if they were in bfloat16.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.convert.mapping import model_parameters
from megarl.convert.readers import DistReader, SafetensorsReader, TensorReader
from megarl.errors import ConfigError, DataError
from megarl.record.checkpoints import read_checkpoint
from megarl.record.metrics import STATE_FILE
from megarl.weights.dist_index import METADATA, read_index
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.mxfp4 import BLOCKS, SCALES, dequantize
from megarl.weights.rules import TOWER
from megarl.weights.safetensors_headers import (
    model_files,
    not_expected,
    read_weight_map,
    require_equal_copies,
    require_floats,
)
from megarl.weights.safetensors_map import TensorSpec
from megarl.weights.tables import Partition
from megarl.weights.towers import Tower

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


# The value of vocab_multiple for opening: it only sets the vocabulary padding, which is read from the checkpoint.
_NO_PADDING = 1
# Keys of optimizer states (with several optimizers, as expert models have, periodic checkpoints number them), and of
# earlier versions of the weights.
_NO_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\.|version\d+\.")
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """An open checkpoint in either format, checked against its config.json. `reader` reads its tensors.

    spec.path: the directory with config.json and tokenizer. weight_map: the file of each tensor in the Hugging Face
    model this was made from; None for a single file. state: name, size and time of each file, to notice changes.
    """

    path: Path
    spec: ModelSpec
    scalar_head: bool
    reader: TensorReader
    weight_map: Mapping[str, str] | None
    state: tuple[tuple[str, int, int], ...]


def open_model(path: Path, model: Path | None = None, tower: Tower | None = None) -> OpenModel:
    """Open a Hugging Face directory or a torch_dist checkpoint, reading and checking headers but no tensors.

    model: the directory of a torch_dist checkpoint's config.json; None: its own, or the model of its training run.
    tower: has the part of a vision tower that counts among a Hugging Face directory's weights; None: no part does.
    """
    has_config = (path / "config.json").is_file()
    if (path / METADATA).is_file():
        if model is not None or has_config:
            return _open_dist(path, model or path)
        if not (path.parent / STATE_FILE).is_file():
            raise ConfigError(f"{path}: has no config.json; name the directory of the model with --model")
        config = read_checkpoint(path.parent).state.config
        by_role = {"actor": None, "critic": config.critic.model_path, "reward_model": None}
        if path.name not in by_role:
            raise ConfigError(
                f"{path}: expected the directory of a role, one of {list(by_role)}; or name it with --model"
            )
        return _open_dist(path, Path(by_role[path.name] or config.model.path))
    if has_config:
        if model is not None:
            raise ConfigError(f"--model: {path} has a config.json of its own; leave --model out")
        return _open_hf(path, tower)
    raise ConfigError(
        f"{path}: neither a Hugging Face directory (no config.json) nor a torch_dist checkpoint (no .metadata); of a "
        f"run give RUN/checkpoints/step_N/actor"
    )


def _open_hf(path: Path, tower: Tower | None) -> OpenModel:
    part = None if tower is None else tower.part
    spec = read_model_spec(path, "MODEL", quantized=(MXFP4,), tower=part)
    architectures = spec.hf_config.get("architectures", ())
    scalar_head = any(name in spec.family.value_architectures for name in architectures)
    require_equal_copies(path, {} if scalar_head else spec.copies())
    reader = (Mxfp4Reader if spec.hf_config.get("quantization_config") else SafetensorsReader)(path)
    compare_specs(path, reader.found, spec.expected_tensors(scalar_head=scalar_head), ignored=spec.ignored_tensors())
    # Tensors that the family ignores are left out.
    reader.specs = {name: reader.found[name] for name in spec.expected_tensors(scalar_head=scalar_head)}
    declared = declared_dtype(spec)
    got = sorted({str(each.dtype).removeprefix("torch.") for each in reader.specs.values()})
    if declared is not None and declared not in got:
        raise DataError(
            f"{path}: dtype: expected {declared}, as config.json says, got {got}; correct dtype in config.json"
        )
    return OpenModel(
        path=path,
        spec=spec,
        scalar_head=scalar_head,
        reader=reader,
        weight_map=read_weight_map(path),
        state=file_states([*model_files(path), path / "config.json"]),
    )


def _open_dist(path: Path, model: Path) -> OpenModel:
    spec = read_model_spec(model, "--model")
    tensors, _ = read_index(path)
    weights = {key: tensor for key, tensor in tensors.items() if not _NO_WEIGHTS.match(key)}
    # A run's checkpoint has of a tower what was trained.
    if of_tower := {key for key in weights if key.startswith(TOWER)}:
        towers = (spec.with_tower("projector"), spec.with_tower("all"))
        spec = next((each for each in towers if each.tower and each.tower.trained_names == of_tower), spec)
    if any(".lora." in key for key in weights):
        raise ConfigError(
            f"{path}: holds adapters without their base; `--resume` the run with its total_steps set to this step, and "
            "it exports them, which megarl convert merge merges"
        )
    scalar_head = "value_head.weight" in weights
    # Megatron stacks layers, unless only some of them have experts: then each layer has its own keys.
    stacked = not any(key.startswith("decoder.layers.0.") for key in weights)
    parameters = []
    for parameter in model_parameters(spec, scalar_head=scalar_head, vocab_multiple=_NO_PADDING, stacked=stacked):
        # Take the key and the vocabulary padding that the checkpoint has.
        key = parameter.key if parameter.key in weights else parameter.other_key
        rows = parameter.shape[0]
        if key in weights:
            if parameter.rule.partition is Partition.VOCAB and (stored := weights[key].spec.shape):
                rows = max(rows, stored[len(parameter.stack)])
            parameter = dataclasses.replace(parameter, key=key, shape=(rows, *parameter.shape[1:]))
        parameters.append(parameter)
    ends: dict[str, int] = {}
    for chunk in (chunk for tensor in weights.values() for chunk in tensor.chunks):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    for name, end in ends.items():
        file = path / name
        if not file.is_file():
            raise DataError(f"{file}: does not exist; copy the checkpoint again")
        if (size := file.stat().st_size) < end:
            raise DataError(f"{file}: expected at least {end} bytes, got {size}; copy the checkpoint again")
    found = {key: tensor.spec for key, tensor in weights.items()}
    compare_specs(path, found, {p.key: p.global_shape for p in parameters})
    return OpenModel(
        path=path,
        spec=spec,
        scalar_head=scalar_head,
        reader=DistReader(path, weights, parameters, spec.expected_tensors(scalar_head=scalar_head)),
        weight_map=read_weight_map(model),
        state=file_states([*sorted(path.glob("*.distcp")), path / ".metadata", model / "config.json"]),
    )


def compare_specs(
    path: Path,
    found: Mapping[str, TensorSpec],
    expected: Mapping[str, Sequence[int]],
    *,
    ignored: Sequence[str] = (),
) -> None:
    """Raise DataError unless the tensors found have exactly the names and shapes expected from config.json."""
    remedy = "give the config.json of this very model, or copy the checkpoint again"
    missing = sorted(expected.keys() - found.keys())
    unknown = not_expected(found, expected, ignored)
    if missing or unknown:
        raise DataError(
            f"{path}: tensors expected by config.json and the family's table but missing: {_few(missing)}; got but not "
            f"expected: {_few(unknown)}; {remedy}"
        )
    require_floats(path, {name: str(found[name].dtype).removeprefix("torch.") for name in expected})
    for name, shape in expected.items():
        if found[name].shape != tuple(shape):
            raise DataError(f"{path}: {name}: expected shape {tuple(shape)}, got {found[name].shape}; {remedy}")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + more


def declared_dtype(spec: ModelSpec) -> str | None:
    """Return the dtype that config.json declares for the weights, under the key dtype or the older torch_dtype."""
    dtype = spec.hf_config.get("dtype", spec.hf_config.get("torch_dtype"))
    return None if dtype is None else str(dtype)


def file_states(files: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and modification time of each file, to notice if the source changed since an earlier run."""
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
