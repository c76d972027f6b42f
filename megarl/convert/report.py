"""What the conversions print: what they would write, and what they have written."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megarl.convert.engine import Outcome, Settings
from megarl.convert.models import OpenModel
from megarl.convert.plan import Plan
from megarl.text_table import align

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


def plan_table(source: OpenModel, plan: Plan, settings: Settings) -> list[str]:
    """Sizes by kind of tensor, and what the conversion needs."""
    rows = [("tensor", "number", "shape", "type", "MiB"), *_rows(plan)]
    source_bytes = sum(spec.num_bytes for spec in source.reader.specs.values())
    files = f"{len(plan.files)} file{'s' if len(plan.files) > 1 else ''}"
    free = shutil.disk_usage(_existing(settings.out)).free
    return [
        *align(rows),
        "",
        f"reads    {source.path}: {_mib(source_bytes)} MiB, family {source.spec.family.name}",
        f"writes   {settings.out}: {_mib(plan.num_bytes)} MiB in {files} and {len(plan.pieces)} pieces, "
        f"{free / 2**30:.0f} GiB free{', too little' if free < plan.num_bytes else ''}",
        f"memory   at most {_mib(plan.peak_bytes)} MiB of tensors in each of {settings.num_workers} processes",
        "Nothing was written (--dry-run).",
    ]


def _rows(plan: Plan) -> Iterator[tuple[str, str, str, str, str]]:
    tensors = [(name, spec) for group in plan.hf_files.values() for name, spec in group.items()]
    tensors += [(name, tensor.spec) for name, tensor in plan.tensors.items()]
    kinds: dict[tuple[str, tuple[int, ...], str], int] = {}
    num_bytes: dict[tuple[str, tuple[int, ...], str], int] = {}
    for name, spec in tensors:
        kind = (_NUMBERS.sub("*", name), spec.shape, str(spec.dtype).removeprefix("torch."))
        kinds[kind] = kinds.get(kind, 0) + 1
        num_bytes[kind] = num_bytes.get(kind, 0) + spec.num_bytes
    for kind, number in kinds.items():
        name, shape, dtype = kind
        yield name, str(number), " × ".join(map(str, shape)), dtype, _mib(num_bytes[kind])
    yield "all", str(len(tensors)), "", "", _mib(sum(num_bytes.values()))


def outcome_line(outcome: Outcome, plan: Plan, settings: Settings, *, seconds: float) -> str:
    """What was done, in one line."""
    kept = f", {outcome.num_kept} kept from an earlier run" if outcome.num_kept else ""
    return (
        f"wrote {settings.out}: {_mib(plan.num_bytes)} MiB, {outcome.num_pieces} pieces{kept}; "
        f"read {_mib(outcome.num_bytes_read)} MiB; {seconds:.1f} s with {settings.num_workers} "
        f"process{'es' if settings.num_workers > 1 else ''}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f}"


def _existing(path: Path) -> Path:
    """The path or the nearest directory above it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())
