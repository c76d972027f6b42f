"""Convert checkpoints: from Hugging Face to Megatron's torch_dist and back, and from MXFP4 to bfloat16."""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megarl.convert.engine import ConversionOutcome, ConvertSettings, carry_out
from megarl.convert.mapping import model_parameters
from megarl.convert.models import Mxfp4Reader, OpenModel, declared_dtype, open_model
from megarl.convert.plan import ConversionPlan, plan_dist, plan_hf
from megarl.convert.readers import FORMAT_FILE, DistReader, SafetensorsReader, write_index
from megarl.errors import ConfigError, DataError
from megarl.host.streams import print_lines
from megarl.host.writing import free_bytes
from megarl.record.text_table import align
from megarl.weights.companions import copy_companions, exported_config, write_config
from megarl.weights.safetensors_headers import INDEX_NAME
from megarl.weights.safetensors_map import (
    UNTRAINED_NAME,
    TensorSpec,
    model_index,
    read_specs,
    untrained_tensors,
    write_tensors,
)

# Rows of the vocabulary are padded to a multiple of this; Megatron loads it under every layout.
VOCAB_MULTIPLE = 128
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


def hf_to_mcore(
    model: Path,
    settings: ConvertSettings,
    *,
    dtype: str | None = None,
    vocab_multiple: int = VOCAB_MULTIPLE,
    dry_run: bool = False,
) -> ConversionOutcome | None:
    """Convert a Hugging Face directory to a torch_dist checkpoint, and copy its configuration and tokenizer into it."""
    if vocab_multiple < 1:
        raise ConfigError(f"--vocab-multiple: got {vocab_multiple}, expected at least 1")
    source = open_model(model)
    if not isinstance(source.reader, SafetensorsReader):
        raise ConfigError(f"{model}: is a torch_dist checkpoint already; use mcore-to-hf to convert it back")
    target = cast_specs(source, dtype)
    parameters = model_parameters(
        source.spec,
        scalar_head=source.scalar_head,
        vocab_multiple=vocab_multiple,
        stacked=source.spec.dims.has_equal_layers,
    )
    plan = plan_dist(parameters, source.reader.specs, target)

    def finish(partial: Path) -> None:
        write_index(partial, plan.tensors, plan.objects)
        if untrained := untrained_tensors(source.spec):
            write_tensors(partial / UNTRAINED_NAME, untrained)
        _write_companions(source, partial, target, skipped=())
        written = open_model(partial).reader
        assert isinstance(written, DistReader)
        _check_written(partial, written.specs, target)
        written.check_records()

    return _run(source, plan, settings, finish, "hf-to-mcore", dry_run=dry_run)


def mcore_to_hf(
    checkpoint: Path,
    settings: ConvertSettings,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    dry_run: bool = False,
) -> ConversionOutcome | None:
    """Convert a torch_dist checkpoint to a Hugging Face directory, with configuration and tokenizer from `model`."""
    source = open_model(checkpoint, model)
    if not isinstance(source.reader, DistReader):
        raise ConfigError(f"{checkpoint}: is a Hugging Face directory already; use hf-to-mcore to convert it")
    return write_hf(source, cast_specs(source, dtype), settings, "mcore-to-hf", dry_run=dry_run)


def dequantize(model: Path, settings: ConvertSettings, *, dry_run: bool = False) -> ConversionOutcome | None:
    """Write a Hugging Face directory with experts in MXFP4 as one in bfloat16."""
    source = open_model(model)
    if not isinstance(source.reader, Mxfp4Reader):
        raise ConfigError(f"{model}: config.json names no quant_method 'mxfp4'; its weights need no conversion")
    return write_hf(source, cast_specs(source, None), settings, "dequantize", dry_run=dry_run)


def write_hf(
    source: OpenModel,
    target: Mapping[str, TensorSpec],
    settings: ConvertSettings,
    description: str,
    *,
    dry_run: bool,
) -> ConversionOutcome | None:
    """Write the tensors of an open checkpoint, in the data types of `target`, as a Hugging Face directory."""
    plan = plan_hf(source.reader.specs, target, weight_map=source.weight_map)

    def finish(partial: Path) -> None:
        files = dict(plan.hf_files)
        if untrained := untrained_tensors(source.spec):
            files[UNTRAINED_NAME] = write_tensors(partial / UNTRAINED_NAME, untrained)
        if len(files) > 1:
            (partial / INDEX_NAME).write_text(json.dumps(model_index(files), indent=2), encoding="utf-8")
        for file, group in plan.hf_files.items():
            if read_specs(partial / file) != dict(group):
                raise DataError(f"{partial / file}: its tensors are not those that were planned; convert again")
        _write_companions(source, partial, target, skipped=("*.index.json", FORMAT_FILE))
        _check_written(partial, open_model(partial, tower=source.spec.tower).reader.specs, target)

    return _run(source, plan, settings, finish, description, dry_run=dry_run)


def _run(
    source: OpenModel,
    plan: ConversionPlan,
    settings: ConvertSettings,
    finish: Callable[[Path], None],
    description: str,
    *,
    dry_run: bool,
) -> ConversionOutcome | None:
    if settings.out.exists() and not settings.overwrite:
        raise ConfigError(f"--out: {settings.out} exists; choose another directory, or replace it with --overwrite")
    if settings.num_workers < 1:
        raise ConfigError(f"--workers: got {settings.num_workers}, expected at least 1")
    if dry_run:
        print_lines(*_plan_table(source, plan, settings))
        return None
    start = time.monotonic()
    try:
        outcome = carry_out(plan, source.reader, source.state, settings, finish, description)
    except OSError as error:
        raise DataError(f"writing {settings.out} failed: {error}; free space, and run the command again") from error
    kept = f", {outcome.num_kept} kept from an earlier run" if outcome.num_kept else ""
    print_lines(
        f"wrote {settings.out}: {_mib(plan.num_bytes)} MiB, {outcome.num_pieces} pieces{kept}; "
        f"read {_mib(outcome.num_bytes_read)} MiB; {time.monotonic() - start:.1f} s with {settings.num_workers} "
        f"process{'es' if settings.num_workers > 1 else ''}"
    )
    return outcome


def cast_specs(source: OpenModel, dtype: str | None) -> dict[str, TensorSpec]:
    """Return shape and dtype of each tensor to write: `dtype`, except those that the family keeps in float32."""
    specs, wide = source.reader.specs, source.spec.float32_tensors()
    if dtype is None:
        return dict(specs)
    return {
        name: dataclasses.replace(spec, dtype=getattr(torch, "float32" if name in wide else dtype))
        if spec.dtype.is_floating_point
        else spec
        for name, spec in specs.items()
    }


def _check_written(partial: Path, written: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    """Raise DataError unless the new checkpoint has exactly the planned tensors, with the planned shapes and dtypes."""
    # Keys and shapes were checked against the family's table when the source was opened.
    wrong = [name for name in expected if written.get(name) != expected[name]]
    if wrong or written.keys() != expected.keys():
        raise DataError(f"{partial}: {wrong[:3]} are not what was to be written; remove the directory, convert again")


def _write_companions(
    source: OpenModel, partial: Path, target: Mapping[str, TensorSpec], *, skipped: tuple[str, ...]
) -> None:
    """Copy configuration, tokenizer and templates; adapt config.json where it would contradict the weights."""
    copy_companions(source.spec.path, partial, skipped=skipped)
    file = partial / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    # The data type of most of the bytes that are written.
    num_bytes: dict[torch.dtype, int] = {}
    for spec in target.values():
        num_bytes[spec.dtype] = num_bytes.get(spec.dtype, 0) + spec.num_bytes
    name = str(max(num_bytes, key=lambda each: num_bytes[each])).removeprefix("torch.")
    changed = exported_config(config, source.spec.family, dtype=name, scalar_head=source.scalar_head)
    # Weights are written without quantisation.
    if (
        changed.pop("quantization_config", None)
        or name != declared_dtype(source.spec)
        or changed.get("architectures") != config.get("architectures")
    ):
        write_config(file, changed)


def _plan_table(source: OpenModel, plan: ConversionPlan, settings: ConvertSettings) -> list[str]:
    """Describe for --dry-run what would be written, by kind of tensor, and the disk space and memory it needs."""
    tensors = [(name, spec) for group in plan.hf_files.values() for name, spec in group.items()]
    tensors += [(name, tensor.spec) for name, tensor in plan.tensors.items()]
    kinds: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for name, spec in tensors:
        kind = (_NUMBERS.sub("*", name), spec.shape, str(spec.dtype).removeprefix("torch."))
        kinds.setdefault(kind, []).append(spec.num_bytes)
    rows = [("tensor", "number", "shape", "type", "MiB")]
    for (name, shape, dtype), sizes in kinds.items():
        rows.append((name, str(len(sizes)), " × ".join(map(str, shape)), dtype, _mib(sum(sizes))))
    rows.append(("all", str(len(tensors)), "", "", _mib(sum(spec.num_bytes for _, spec in tensors))))
    source_bytes = sum(spec.num_bytes for spec in source.reader.specs.values())
    files = f"{len(plan.files)} file{'s' if len(plan.files) > 1 else ''}"
    free = free_bytes(settings.out)
    # Converting a piece needs a buffer, and a second one if its data type changes.
    peak_bytes = max(
        piece.source_bytes + piece.unstack_bytes + (piece.num_bytes if piece.dtype != piece.source_dtype else 0)
        for piece in plan.pieces
    )
    return [
        *align(rows),
        "",
        f"reads    {source.path}: {_mib(source_bytes)} MiB, family {source.spec.family.name}",
        f"writes   {settings.out}: {_mib(plan.num_bytes)} MiB in {files} and {len(plan.pieces)} pieces, "
        f"{free / 2**30:.0f} GiB free{', too little' if free < plan.num_bytes else ''}",
        f"memory   at most {_mib(peak_bytes)} MiB of tensors in each of {settings.num_workers} processes",
        "Nothing was written (--dry-run).",
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f}"
