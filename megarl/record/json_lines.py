"""Append to files of one JSON object per line, read them back, and cut them, so that a kill loses at most one line."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from megarl.errors import DataError
from megarl.host.reading import RESTORE, instead, reading, reason_of
from megarl.host.streams import print_lines
from megarl.host.unicode import plain
from megarl.host.writing import replacing, writing

T = TypeVar("T")


def open_lines(path: Path) -> FileIO:
    """Open a file for `append_lines`; an incomplete last line, left by a kill, is removed, not continued."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
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


def read_lines(path: Path, parse: Callable[[Any], T], *, expected: str, missing_ok: bool = False) -> list[T]:
    """Parse every line of a file in order; an incomplete last line, left by a kill, is skipped.

    Any other line that is not JSON, or that `parse` refuses, raises DataError with its number. expected: what a line
    should hold, for that message. missing_ok: return no lines if there is no file.
    """
    if missing_ok and not os.path.lexists(path):
        return []
    with reading(path, "JSON lines", remedy=RESTORE):
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                parsed.append(parse(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if number < len(lines):
                got = f"{path} line {number}: got {line[:80]!r} ({reason_of(error)}), expected {expected}"
                raise DataError(instead(path, "JSON lines", RESTORE) or f"{got}; repair or remove this line") from error
    return parsed


def truncate_lines(path: Path, last_step: int) -> None:
    """Remove the lines whose `step` is after `last_step`; the file, if there is one, is replaced atomically.

    Lines that have none, as a crash of the machine or a hand may leave them, are removed too, and a warning names them.
    """
    if not path.exists():
        return
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
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
