"""Carry out a plan: preallocate, convert the pieces that are missing, check, and give the directory its name."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megarl.convert.dist_format import save_chunk
from megarl.convert.files import WindowWriter, exclusive, preallocate, range_checksum, sync
from megarl.convert.journal import STATE, Journal, fingerprint
from megarl.convert.plan import OutputFile, Piece, Plan
from megarl.convert.readers import TensorReader
from megarl.convert.workers import WorkerPool
from megarl.errors import ConfigError
from megarl.record.progress import Progress, ProgressValues

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where a conversion writes, with how many processes, and whether it replaces what is there."""

    out: Path
    num_workers: int
    overwrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece to convert; `checksum` is that of its bytes if an earlier run has written them."""

    index: int
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A piece in its place. num_bytes_read: of the source, to write it."""

    index: int
    checksum: int
    num_bytes_read: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a conversion did. num_kept: pieces that an earlier run had written."""

    num_pieces: int
    num_kept: int
    num_bytes_read: int
    num_bytes_written: int


def default_workers() -> int:
    """As many as cores, up to what keeps most storage busy."""
    return min(8, len(os.sched_getaffinity(0)))


def partial_dir(out: Path) -> Path:
    """Where a conversion writes until it is complete."""
    return out.with_name(out.name + ".partial")


def check_target(settings: Settings) -> None:
    """Refuse to replace a directory unless told to."""
    if settings.out.exists() and not settings.overwrite:
        raise ConfigError(f"--out: {settings.out} exists; choose another directory, or replace it with --overwrite")
    if settings.num_workers < 1:
        raise ConfigError(f"--workers: got {settings.num_workers}, expected at least 1")


def carry_out(
    plan: Plan,
    reader: TensorReader,
    source: Sequence[object],
    settings: Settings,
    finish: Callable[[Path], None],
    description: str,
) -> Outcome:
    """Convert all pieces and rename the directory; `finish` adds what else belongs there and checks the whole.

    source: names the state of the source's files; a conversion of others is not continued.
    """
    partial = partial_dir(settings.out)
    (partial / STATE).mkdir(parents=True, exist_ok=True)
    with exclusive(partial / STATE / "lock"):
        journal = _prepare(partial, plan, fingerprint(plan, source), overwrite=settings.overwrite)
        outcome = _convert(partial, plan, reader, journal, settings.num_workers, description)
        finish(partial)
        for path in [*(path for path in partial.rglob("*") if STATE not in path.parts), partial]:
            sync(path)
        if settings.out.exists():
            shutil.rmtree(settings.out)
        shutil.rmtree(partial / STATE)
        partial.rename(settings.out)
        sync(settings.out.parent)
    return outcome


def _prepare(partial: Path, plan: Plan, name: str, *, overwrite: bool) -> Journal:
    """Preallocate all files, unless an earlier run of the same conversion has."""
    journal = Journal(partial)
    if journal.name() not in (None, name) and not overwrite:
        raise ConfigError(
            f"{partial}: holds part of another conversion (other options, or the source has changed since); remove it, "
            f"or start again with --overwrite"
        )
    if journal.name() != name:
        journal.clear()
        for path in partial.iterdir():
            if path.name != STATE:
                path.unlink()
        for file in plan.files:
            _create(partial, file)
        journal.begin(name)
    return journal


def _create(directory: Path, file: OutputFile) -> None:
    preallocate(directory / file.name, file.num_bytes)
    with (directory / file.name).open("r+b") as stream:
        for offset, data in file.fixed:
            stream.seek(offset)
            stream.write(data)


def _convert(
    partial: Path, plan: Plan, reader: TensorReader, journal: Journal, num_workers: int, description: str
) -> Outcome:
    written = journal.done()
    tasks = [Task(index=i, checksum=written.get(i)) for i in range(len(plan.pieces))]
    # Each process has memory of its own behind it from the first piece on, and uses it for all: fresh pages cost time.
    scratch = np.empty(max(piece.source_bytes for piece in plan.pieces), dtype=np.uint8)

    def convert(task: Task) -> Done:
        return convert_piece(partial, plan.pieces[task.index], reader, task, scratch)

    num_kept, num_read, num_done = 0, 0, 0
    total = sum(piece.num_bytes for piece in plan.pieces)
    with (
        # Processes first: a bar on a terminal has a thread, which a fork would lose.
        WorkerPool(convert, min(num_workers, len(tasks))) as pool,
        Progress(total=-(-total // _MIB), description=f"{description}, MiB", stream=sys.stderr) as progress,
    ):
        for done in pool.map_unordered(tasks):
            if done.is_new:
                journal.add(done.index, done.checksum)
            num_kept += not done.is_new
            num_read += done.num_bytes_read
            num_done += plan.pieces[done.index].num_bytes
            progress.update(-(-total // _MIB) if num_done == total else num_done // _MIB, ProgressValues())
    return Outcome(num_pieces=len(tasks), num_kept=num_kept, num_bytes_read=num_read, num_bytes_written=plan.num_bytes)


@torch.no_grad()
def convert_piece(directory: Path, piece: Piece, reader: TensorReader, task: Task, scratch: np.ndarray) -> Done:
    """Write a piece, unless the bytes that an earlier run wrote are still there.

    scratch: bytes, at least as large as the piece's source.
    """
    file, before = directory / piece.file, reader.num_bytes_read
    if task.checksum is not None and range_checksum(file, piece.offset, piece.length) == task.checksum:
        return Done(index=task.index, checksum=task.checksum, num_bytes_read=0, is_new=False)
    # A storage of the piece's size: torch.save writes all of a storage.
    buffer = torch.from_numpy(scratch[: piece.source_bytes]).view(piece.source_dtype).view(piece.shape)
    if sum(copy.num_rows for copy in piece.copies) < piece.shape[0]:
        buffer.zero_()
    for copy in piece.copies:
        reader.read(copy.tensor, copy.tensor_row, buffer[copy.row : copy.row + copy.num_rows])
    buffer = buffer.to(piece.dtype)
    descriptor = os.open(file, os.O_WRONLY)
    try:
        writer = WindowWriter(descriptor, piece.offset, piece.length)
        if piece.chunk_shape is None:
            writer.write_tensor(buffer)
        else:
            save_chunk(writer, buffer.view(piece.chunk_shape))
        assert writer.is_full, f"{piece.name} is smaller than planned"
    finally:
        os.close(descriptor)
    return Done(
        index=task.index,
        checksum=writer.checksum,
        num_bytes_read=reader.num_bytes_read - before,
        is_new=True,
    )
