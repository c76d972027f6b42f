"""Whether two checkpoints hold the same model: the same tensors, bit for bit, and only finite numbers."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.convert.models import OpenModel, open_model
from megarl.convert.plan import row_ranges
from megarl.convert.workers import WorkerPool
from megarl.record.progress import Progress, ProgressValues

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a tensor that are compared at a time."""

    tensor: str
    row: int
    num_rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part that differs, or holds NaN or infinity. first: index of the first element that differs."""

    tensor: str
    row: int
    num_different: int
    first: tuple[int, ...] | None
    values: tuple[float, float] | None
    num_non_finite: tuple[int, int]
    num_bytes: int

    @property
    def is_fine(self) -> bool:
        return self.num_different == 0 and self.num_non_finite == (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How two checkpoints differ, in lines; none if they do not."""

    num_tensors: int
    num_bytes: int
    problems: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return not self.problems


def verify(first: Path, second: Path, *, model: Path | None, num_workers: int) -> Verdict:
    """Compare two checkpoints, each a Hugging Face directory or a torch_dist checkpoint.

    model: the directory with the config.json of torch_dist checkpoints that have none.
    """
    a, b = (open_model(path, None if (path / "config.json").is_file() else model) for path in (first, second))
    problems = list(_spec_problems(a, b))
    parts = list(_parts(a, b))

    def compare(part: Part) -> Finding:
        return compare_part(a, b, part)

    total = sum(part.num_bytes for part in parts)
    num_done, findings = 0, []
    with (
        WorkerPool(compare, max(1, min(num_workers, len(parts)))) as pool,
        Progress(total=-(-total // _MIB), description="verify, MiB", stream=sys.stderr) as progress,
    ):
        for finding in pool.map_unordered(parts):
            num_done += finding.num_bytes
            if not finding.is_fine:
                findings.append(finding)
            progress.update(-(-total // _MIB) if num_done == total else num_done // _MIB, ProgressValues())
    problems += _describe(findings)
    return Verdict(num_tensors=len({part.tensor for part in parts}), num_bytes=total, problems=tuple(problems))


def _spec_problems(a: OpenModel, b: OpenModel) -> Iterator[str]:
    for name in sorted(a.reader.specs.keys() - b.reader.specs.keys()):
        yield f"missing: {name} is not in {b.path}"
    for name in sorted(b.reader.specs.keys() - a.reader.specs.keys()):
        yield f"unexpected: {name} is not in {a.path}"
    for name in sorted(a.reader.specs.keys() & b.reader.specs.keys()):
        one, other = a.reader.specs[name], b.reader.specs[name]
        if one != other:
            yield f"{name}: expected {one.shape} of {one.dtype}, got {other.shape} of {other.dtype}"


def _parts(a: OpenModel, b: OpenModel) -> Iterator[Part]:
    """Of the tensors that both have, in the same shape and type."""
    for name, spec in a.reader.specs.items():
        if b.reader.specs.get(name) == spec:
            row_bytes = spec.num_bytes // spec.shape[0]
            for row, num_rows in row_ranges(spec.shape, spec.dtype.itemsize):
                yield Part(tensor=name, row=row, num_rows=num_rows, num_bytes=num_rows * row_bytes)


def compare_part(a: OpenModel, b: OpenModel, part: Part) -> Finding:
    """Bits of the same rows of both."""
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
    return Finding(
        tensor=part.tensor,
        row=part.row,
        num_different=num_different,
        first=first,
        values=values,
        num_non_finite=(_num_non_finite(one), _num_non_finite(other)),
        num_bytes=part.num_bytes,
    )


def _num_non_finite(tensor: torch.Tensor) -> int:
    """A sum is finite only if all its terms are; only where it is not, elements are counted."""
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum(dtype=torch.float32))):
        return 0
    return int((~tensor.isfinite()).sum())


def _describe(findings: list[Finding]) -> Iterator[str]:
    """A line per tensor and kind of problem, in the order of names and rows."""
    by_tensor: dict[str, list[Finding]] = {}
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
