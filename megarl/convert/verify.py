"""Verify that two checkpoints hold the same model: the same tensors, bit for bit, without NaNs and infinities."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megarl.convert.models import OpenModel, open_model
from megarl.convert.plan import row_ranges
from megarl.convert.workers import WorkerPool
from megarl.record.progress import Progress, ProgressValues
from megarl.weights.safetensors_map import same_bytes, untrained_tensors

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRows:
    """A block of a tensor's rows that one worker compares between two checkpoints at a time."""

    tensor: str
    row: int
    num_rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockComparison:
    """The result of comparing a block of rows. `first` and `values`: index and both values of the first difference."""

    tensor: str
    row: int
    num_different: int
    first: tuple[int, ...] | None
    values: tuple[float, float] | None
    num_non_finite: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of comparing two checkpoints. `problems` has a line per difference or non-finite tensor."""

    num_tensors: int
    num_bytes: int
    problems: tuple[str, ...]


def verify(first: Path, second: Path, *, model: Path | None, num_workers: int) -> Verification:
    """Compare two checkpoints bit for bit; each is a Hugging Face directory or a torch_dist checkpoint.

    model: the directory with the config.json of torch_dist checkpoints that have none.
    """
    sources = [(path, None if (path / "config.json").is_file() else model) for path in (first, second)]
    a, b = (open_model(*each) for each in sources)
    if (tower := a.spec.tower or b.spec.tower) is not None:
        # A tower that was trained in one of them is compared in both.
        a, b = (open_model(*each, tower) for each in sources)
    ours, theirs = a.reader.specs, b.reader.specs
    problems = [f"missing: {name} is not in {b.path}" for name in sorted(ours.keys() - theirs.keys())]
    problems += [f"unexpected: {name} is not in {a.path}" for name in sorted(theirs.keys() - ours.keys())]
    problems += [
        f"{name}: expected {ours[name].shape} of {ours[name].dtype}, got {theirs[name].shape} of {theirs[name].dtype}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]
    # Conversion only copies these tensors; they are few, and compared here.
    carried_a, carried_b = untrained_tensors(a.spec), untrained_tensors(b.spec)
    problems += [f"missing: {name} is not in {b.path}" for name in sorted(carried_a.keys() - carried_b.keys())]
    problems += [f"unexpected: {name} is not in {a.path}" for name in sorted(carried_b.keys() - carried_a.keys())]
    both = sorted(carried_a.keys() & carried_b.keys())
    problems += [f"{name}: differs" for name in both if not same_bytes(carried_a[name], carried_b[name])]
    # Only tensors that both have, in the same shape and data type, are compared.
    parts = [
        ComparedRows(tensor=name, row=row, num_rows=num_rows, num_bytes=num_rows * (spec.num_bytes // spec.shape[0]))
        for name, spec in ours.items()
        if theirs.get(name) == spec
        for row, num_rows in row_ranges(spec.shape, spec.dtype.itemsize)
    ]
    total = sum(part.num_bytes for part in parts)
    num_done, findings = 0, []
    with (
        WorkerPool(partial(_compare, a, b), max(1, min(num_workers, len(parts)))) as pool,
        Progress(total=-(-total // _MIB), description="verify, MiB", stream=sys.stderr) as progress,
    ):
        for finding in pool.map_unordered(parts):
            num_done += finding.num_bytes
            if finding.num_different or any(finding.num_non_finite):
                findings.append(finding)
            progress.update(-(-total // _MIB) if num_done == total else num_done // _MIB, ProgressValues())
    problems += _describe(findings)
    num_tensors = len({part.tensor for part in parts}) + len(both)
    return Verification(num_tensors=num_tensors, num_bytes=total, problems=tuple(problems))


def _compare(a: OpenModel, b: OpenModel, part: ComparedRows) -> BlockComparison:
    """Read one block of rows from both checkpoints, compare the bits, and count NaNs and infinities."""
    spec = a.reader.specs[part.tensor]
    one, other = (torch.empty((part.num_rows, *spec.shape[1:]), dtype=spec.dtype) for _ in range(2))
    a.reader.read(part.tensor, part.row, one)
    b.reader.read(part.tensor, part.row, other)
    bits = _INTEGERS[spec.dtype.itemsize]
    num_different, first, values = 0, None, None
    if not torch.equal(one.view(bits), other.view(bits)):
        different = one.view(bits) != other.view(bits)
        num_different = int(different.sum())
        at = [int(i) for i in different.nonzero()[0]]
        values = (float(one[tuple(at)]), float(other[tuple(at)]))
        first = (part.row + at[0], *at[1:])
    return BlockComparison(
        tensor=part.tensor,
        row=part.row,
        num_different=num_different,
        first=first,
        values=values,
        num_non_finite=(_num_non_finite(one), _num_non_finite(other)),
        num_bytes=part.num_bytes,
    )


def _num_non_finite(tensor: torch.Tensor) -> int:
    """Count the elements that are NaN or infinite."""
    # A finite sum shows that all terms are finite; elements are counted only if the sum is not.
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum(dtype=torch.float32))):
        return 0
    return int((~tensor.isfinite()).sum())


def _describe(findings: list[BlockComparison]) -> Iterator[str]:
    """Yield one line per tensor for differing elements and one for non-finite elements, sorted by tensor name."""
    by_tensor: dict[str, list[BlockComparison]] = {}
    for finding in sorted(findings, key=lambda each: (each.tensor, each.row)):
        by_tensor.setdefault(finding.tensor, []).append(finding)
    for name, found in by_tensor.items():
        num_different = sum(each.num_different for each in found)
        if num_different:
            first = next(each for each in found if each.num_different)
            assert first.first is not None
            assert first.values is not None
            at = ", ".join(map(str, first.first))
            yield (
                f"{name}: {num_different:,} elements differ, the first at [{at}]: "
                f"{first.values[0]!r} and {first.values[1]!r}"
            )
        non_finite = [sum(each.num_non_finite[side] for each in found) for side in range(2)]
        if any(non_finite):
            yield f"{name}: {non_finite[0]:,} and {non_finite[1]:,} elements are NaN or infinite"
