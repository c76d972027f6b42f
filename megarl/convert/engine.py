"""Carry out a planned conversion: preallocate files, convert missing pieces, check the result, rename the directory."""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch

from megarl.convert.files import WindowWriter, bytes_of, exclusive, range_checksum
from megarl.convert.plan import ConversionPlan
from megarl.convert.readers import TensorReader
from megarl.convert.workers import WorkerPool
from megarl.errors import ConfigError
from megarl.host.directory_lock import DirectoryLock
from megarl.host.writing import fsync
from megarl.record.progress import Progress, ProgressValues
from megarl.weights.safetensors_map import preallocate
from megarl.weights.slices import turned

# The directory within OUT.partial that records which pieces are finished.
STATE = ".convert"

_MIB = 1 << 20
# The checksum has a fixed width, so that a line that was cut short does not match.
_LINE = re.compile(r"(\d+) (\d{10})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """Where a conversion writes, with how many processes, and whether it replaces an existing directory."""

    out: Path
    num_workers: int
    overwrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPiece:
    """A piece of output to convert, or to check if an earlier run has written it, with the given `checksum`."""

    index: int
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPiece:
    """A piece of output that was written: by this run (`is_new`), or by an earlier one (num_bytes_read is 0)."""

    index: int
    checksum: int
    num_bytes_read: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOutcome:
    """The outcome of a conversion, in pieces and bytes; num_kept counts the pieces that an earlier run had written."""

    num_pieces: int
    num_kept: int
    num_bytes_read: int
    num_bytes_written: int


class Journal:
    """A record in OUT.partial/.convert of the pieces that are written, so that a killed conversion can continue.

    `name_file` holds a hash of the plan and of the source's state; it is written once all files are preallocated.
    `done_file` gets one line per finished piece, with the checksum of its bytes. A continued conversion verifies these
    checksums and converts again every piece that a crash of the machine has lost.
    """

    def __init__(self, directory: Path) -> None:
        self.name_file, self.done_file = directory / STATE / "plan", directory / STATE / "done"

    def done(self) -> dict[int, int]:
        """Return the checksums of finished pieces by index; journal lines that a crash cut short are ignored."""
        lines = self.done_file.read_text(encoding="utf-8").splitlines() if self.done_file.is_file() else ()
        found = (_LINE.fullmatch(line) for line in lines)
        return {int(each[1]): int(each[2]) for each in found if each}

    def add(self, piece: int, checksum: int) -> None:
        """Record that a piece is written, with its CRC-32, so that a continued conversion can skip it."""
        with self.done_file.open("a", encoding="utf-8") as file:
            file.write(f"{piece} {checksum:010d}\n")


def partial_dir(out: Path) -> Path:
    """Return the directory OUT.partial in which a conversion writes before it is complete and renamed to OUT."""
    return out.with_name(out.name + ".partial")


def carry_out(
    plan: ConversionPlan,
    reader: TensorReader,
    source: Sequence[object],
    settings: ConvertSettings,
    finish: Callable[[Path], None],
    description: str,
) -> ConversionOutcome:
    """Convert all pieces into OUT.partial, let `finish` write the other files and check all, then rename it to OUT.

    source: name, size and time of the source's files; an earlier conversion is continued only if they are the same.
    """
    partial = partial_dir(settings.out)
    owned = DirectoryLock(settings.out, "convert", place=settings.out.with_name(f"{settings.out.name}.lock"))
    with owned, exclusive(partial / STATE / "lock"):
        # The name depends on everything that is written and on the source's files.
        name = hashlib.sha256(repr((plan.files, plan.pieces, tuple(source))).encode()).hexdigest()
        journal = _prepare(partial, plan, name, overwrite=settings.overwrite)
        outcome = _convert(partial, plan, reader, journal, settings.num_workers, description)
        finish(partial)
        for path in [*(path for path in partial.rglob("*") if STATE not in path.parts), partial]:
            fsync(path)
        owned.require()
        if settings.out.exists():
            shutil.rmtree(settings.out)
        shutil.rmtree(partial / STATE)
        partial.rename(settings.out)
        fsync(settings.out.parent)
    return outcome


def _prepare(partial: Path, plan: ConversionPlan, name: str, *, overwrite: bool) -> Journal:
    """Preallocate all files and return their journal; keep files that an earlier run of this conversion has begun."""
    journal = Journal(partial)
    begun = journal.name_file.read_text(encoding="utf-8") if journal.name_file.is_file() else None
    if begun not in (None, name) and not overwrite:
        raise ConfigError(
            f"{partial}: holds part of another conversion (other options, or the source has changed since); remove it, "
            f"or start again with --overwrite"
        )
    if begun != name:
        journal.name_file.unlink(missing_ok=True)
        journal.done_file.unlink(missing_ok=True)
        for path in partial.iterdir():
            if path.name != STATE:
                path.unlink()
        for file in plan.files:
            preallocate(partial / file.name, file.num_bytes)
            with (partial / file.name).open("r+b") as stream:
                for offset, data in file.fixed:
                    stream.seek(offset)
                    stream.write(data)
        # Written last: its presence means that all files are preallocated.
        unfinished = journal.name_file.with_suffix(".partial")
        unfinished.write_text(name, encoding="utf-8")
        unfinished.replace(journal.name_file)
    return journal


def _convert(
    partial: Path, plan: ConversionPlan, reader: TensorReader, journal: Journal, num_workers: int, description: str
) -> ConversionOutcome:
    written = journal.done()
    pending = [PendingPiece(index=i, checksum=written.get(i)) for i in range(len(plan.pieces))]
    # After the fork, each process has its own copy of this buffer and reuses it for all pieces: new pages cost time.
    scratch = np.empty(max(piece.source_bytes for piece in plan.pieces), dtype=np.uint8)
    convert = bind(_convert_piece, partial, plan, reader, scratch)
    num_kept, num_read, num_done = 0, 0, 0
    total = sum(piece.num_bytes for piece in plan.pieces)
    with (
        # Processes are forked first, because a progress bar on a terminal has a thread, which a fork would lose.
        WorkerPool(convert, min(num_workers, len(pending))) as pool,
        Progress(total=-(-total // _MIB), description=f"{description}, MiB", stream=sys.stderr) as progress,
    ):
        for done in pool.map_unordered(pending):
            if done.is_new:
                journal.add(done.index, done.checksum)
            num_kept += not done.is_new
            num_read += done.num_bytes_read
            num_done += plan.pieces[done.index].num_bytes
            progress.update(-(-total // _MIB) if num_done == total else num_done // _MIB, ProgressValues())
    return ConversionOutcome(
        num_pieces=len(pending), num_kept=num_kept, num_bytes_read=num_read, num_bytes_written=plan.num_bytes
    )


@torch.no_grad()
def _convert_piece(
    directory: Path, plan: ConversionPlan, reader: TensorReader, scratch: np.ndarray, pending: PendingPiece
) -> FinishedPiece:
    """Convert and write one piece, unless the bytes that an earlier run wrote still match their checksum.

    scratch: a byte buffer, reused between pieces, for the source elements of one piece.
    """
    piece = plan.pieces[pending.index]
    file, before = directory / piece.file, reader.files.num_bytes
    if pending.checksum is not None and range_checksum(file, piece.offset, piece.length) == pending.checksum:
        return FinishedPiece(index=pending.index, checksum=pending.checksum, num_bytes_read=0, is_new=False)
    # The storage has exactly the piece's size, because torch.save writes all of a storage.
    buffer = torch.from_numpy(scratch[: piece.source_bytes]).view(piece.source_dtype).view(piece.shape)
    if sum(copy.num_rows for copy in piece.copies) < piece.shape[0]:
        buffer.zero_()
    for copy in piece.copies:
        target = buffer[copy.row : copy.row + copy.num_rows]
        if copy.unstack is None:
            reader.read(copy.tensor, copy.tensor_row, target)
            continue
        stacked = torch.empty((1, *reader.specs[copy.tensor].shape[1:]), dtype=piece.source_dtype)
        reader.read(copy.tensor, copy.tensor_row, stacked)
        parameter = torch.empty(copy.unstack.shape, dtype=piece.source_dtype)
        view = turned(copy.unstack.rule, parameter)
        view.copy_(stacked.view(view.shape))
        target.copy_(parameter[copy.unstack.row : copy.unstack.row + copy.num_rows])
    buffer = buffer.to(piece.dtype)
    descriptor = os.open(file, os.O_WRONLY)
    try:
        writer = WindowWriter(descriptor, piece.offset, piece.length)
        if piece.chunk_shape is None:
            writer.write(bytes_of(buffer))
        else:
            torch.save(buffer.view(piece.chunk_shape), cast(IO[bytes], writer))
        assert not writer.num_left, f"{piece.name} is smaller than planned"
    finally:
        os.close(descriptor)
    return FinishedPiece(
        index=pending.index,
        checksum=writer.checksum,
        num_bytes_read=reader.files.num_bytes - before,
        is_new=True,
    )
