"""Append to files of one JSON object per line, read them back, and cut them, so that a kill loses at most one line."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from megarl.errors import DataError
from megarl.host.reading import RESTORE, instead, reading, reason_of
from megarl.host.streams import print_lines
from megarl.host.unicode import plain
from megarl.host.writing import replacing, writing

T = TypeVar("T")
# The size from which on a file that rotates is put aside, and how much of the end is read at once to find a torn line.
ROTATED_BYTES, BLOCK_BYTES = 16 << 20, 1 << 16


def older(path: Path) -> Path:
    """Return where the lines before those of a file are, if it rotates and has been put aside."""
    return path.with_name(f"{path.stem}.older{path.suffix}")


def open_lines(path: Path, *, rotates: bool = False) -> FileIO:
    """Open a file for `append_lines`; an incomplete last line, left by a kill, is removed, not continued.

    rotates: once it is large, it takes the place of the `older` lines, which are lost, and a new one is opened.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        if rotates and path.exists() and path.stat().st_size >= ROTATED_BYTES:
            os.replace(path, older(path))
        # Without a buffer: closing the file would write again what a full disk has refused.
        return path.open("ab", buffering=0)


def append_lines(file: FileIO, objects: Iterable[object]) -> None:
    """Write one line per object, all of them on disk when this returns; NaN and infinity raise ValueError.

    A value that JSON or UTF-8 cannot hold is written as the text that `plain` makes of it. If the storage refuses, the
    file has none of the objects, and StorageError names it.
    """
    data = memoryview("".join(json.dumps(plain(value), allow_nan=False) + "\n" for value in objects).encode())
    before = os.fstat(file.fileno()).st_size
    with writing(Path(file.name)):
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def read_lines(
    path: Path, parse: Callable[[Any], T], *, expected: str, missing_ok: bool = False, kind: type[T] | None = None
) -> list[T]:
    """Parse every line of a file in order, and the `older` ones before, as `iterate_lines` does. missing_ok: without a
    file there are no lines.
    """
    files = [older(path)] if os.path.lexists(older(path)) else []
    if not missing_ok or os.path.lexists(path):
        files.append(path)
    return [line for file in files for line in iterate_lines(file, parse, expected=expected, kind=kind)]


def iterate_lines(
    path: Path, parse: Callable[[Any], T], *, expected: str, start: int = 0, kind: type[T] | None = None
) -> Iterator[T]:
    """Parse every line of a file in order, from the one after byte `start` − 1 on; an incomplete last line, left by a
    kill, is skipped.

    Another line that is no JSON, or that `parse` refuses, raises DataError with its number. expected: the rest of that
    message, what a line should hold. kind: a dataclass with the fields of a line, which is made of lines that fit
    without `parse`, in a third of the time.
    """
    # It takes a quarter of the time of the standard library's, and refuses what that reads in its own way.
    from msgspec import DecodeError
    from msgspec.json import Decoder

    decoder: Decoder[Any] = Decoder(Any if kind is None else kind)
    with reading(path, "JSON lines", remedy=RESTORE), path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    try:
                        found = decoder.decode(line)
                        yield found if kind is not None else parse(found)
                    except DecodeError:
                        yield parse(json.loads(line.decode("utf-8", errors="replace")))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                if line.endswith(b"\n"):
                    text = line.decode("utf-8", errors="replace").rstrip("\n")[:80]
                    where = f"{path}: the end" if start else f"{path} line {number}"
                    got = f"{where}: got {text!r} ({reason_of(error)}), expected {expected}"
                    told = instead(path, "JSON lines", RESTORE) or f"{got}; repair or remove this line"
                    raise DataError(told) from error


def truncate_lines(path: Path, last_step: int) -> None:
    """Remove the lines whose `step` is after `last_step`, also of those that are `older`; the file, if there is one, is
    replaced atomically.

    Lines that have none, as a crash of the machine or a hand may leave them, are removed too, and a warning names them.
    """
    for part in (older(path), path):
        if part.exists():
            _truncate(part, last_step)


def _truncate(path: Path, last_step: int) -> None:
    _drop_torn_line(path)
    damaged = []
    with replacing(path) as partial, path.open("rb") as lines, partial.open("wb") as file:
        for number, line in enumerate(lines, start=1):
            try:
                if int(json.loads(line)["step"]) <= last_step:
                    file.write(line)
            except (ValueError, TypeError, KeyError):
                damaged += [str(number)] if line.strip() else []
        file.flush()
        os.fsync(file.fileno())
    if damaged:
        print_lines(f"warning: {path}: got no record in line {', '.join(damaged)}, as a crash may leave; removed it")


def _drop_torn_line(path: Path) -> None:
    """Truncate the file after its last newline, so that the next record does not continue a torn line."""
    if path.exists():
        with path.open("rb+") as file:
            start = end = file.seek(0, os.SEEK_END)
            newline = -1
            while newline < 0 and (end := start):
                start = max(0, end - BLOCK_BYTES)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
            file.truncate(start + newline + 1)
