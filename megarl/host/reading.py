"""Read files of users and runs; any library's error about a damaged file becomes one line with the remedy."""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megarl.errors import ConfigError, DataError

COPY_AGAIN = "copy it again"
MODEL_REMEDY = "copy the model again"
RESTORE = "restore what the run wrote"
MAX_REASON_CHARS = 200
# How much of a file is looked at to say what it is.
_HEAD_BYTES = 4096
# A file of the wrong kind often begins with these first bytes; then what it is, and what to do about it.
_KINDS: tuple[tuple[bytes | tuple[bytes, ...], str, str], ...] = (
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS", "fetch the file itself with `git lfs pull`"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with Zstandard", "unpack it with `zstd -d`"),
    (b"BZh", "compressed with bzip2", "unpack it with bunzip2"),
    (b"\xfd7zXZ\0", "compressed with xz", "unpack it with unxz"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip"),
    (b"PAR1", "a Parquet file", "give it its right name or setting"),
    ((b"<!DOCTYPE", b"<!doctype", b"<html"), "a web page", "download the file itself"),
    ((b"\xff\xfe", b"\xfe\xff"), "text in UTF-16", "write it in UTF-8"),
)
_TYPES = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


# Makes an error of a file from its message: ConfigError or DataError.
FileError: TypeAlias = Callable[[str], Exception]


@contextlib.contextmanager
def reading(path: Path, expected: str, *, remedy: str = COPY_AGAIN, error: FileError = DataError) -> Iterator[None]:
    """Within this context, some library reads the file `path`, which should be `expected`, such as "JSON".

    Whatever goes wrong is raised as an `error` of one line, which names the path, what was found and the remedy:
    `remedy`, unless the file itself shows a better one, as a pointer of Git LFS does. megarl's own errors pass.
    """
    require_file(path, expected, remedy=remedy, error=error)
    try:
        yield
    except (ConfigError, DataError):
        raise
    # Libraries have no class of errors in common: that of tokenizers is Exception itself, and a value of the wrong type
    # in a file may become any error of Python.
    except Exception as failure:
        raise error(damage(path, expected, failure, remedy=remedy)) from failure


def require_file(path: Path, expected: str, *, remedy: str = COPY_AGAIN, error: FileError = DataError) -> None:
    """Raise `error` unless `path` is a file that exists and may be read. Nothing but a file is opened: a pipe would
    wait for its writer.
    """
    try:
        mode = path.stat().st_mode
    except OSError as failure:
        is_absent = isinstance(failure, FileNotFoundError)
        found = "no such file" if is_absent else failure.strerror
        if path.is_symlink():
            found = f"is a link to {path.readlink()}, where there is {found}"
        elif is_absent and not path.is_absolute() and Path(".").is_dir():
            found = f"{found} in {Path.cwd()}"
        raise error(f"{path}: {found}, expected {expected}; {remedy}") from failure
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _TYPES if is_kind(mode)), "no file")
        raise error(f"{path}: is {kind}, expected {expected}; {remedy}")
    if not os.access(path, os.R_OK):
        raise error(f"{path}: this user may not read it; chmod u+r, or ask its owner")


def damage(path: Path, expected: str, failure: Exception, *, remedy: str = COPY_AGAIN, where: str | None = None) -> str:
    """Return the message for a file in which a library found an error: what it is instead, or the library's reason.

    where: the place in the file, such as its row, if the reason is one of that place.
    """
    return instead(path, expected, remedy) or f"{where or path}: not {expected}: {reason_of(failure)}; {remedy}"


def instead(path: Path, expected: str, remedy: str = COPY_AGAIN) -> str | None:
    """Return the message for a file that evidently is something else, as its first bytes show; None if none shows."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if not head:
            return f"{path}: is empty, expected {expected}; {remedy}"
        for start, kind, better in _KINDS:
            if head.startswith(start) and kind not in expected:
                return f"{path}: is {kind}, expected {expected}; {better}"
        if expected == "a Parquet file" and head.isascii() and b"\0" not in head and head[:4] != b"PAR1":
            return f"{path}: is text, expected {expected}; convert it, or give it its right name"
        if not head.strip(b"\0"):
            return f"{path}: begins with zero bytes, as after an interrupted copy, expected {expected}; {remedy}"
        if any(line.startswith((b"<<<<<<< ", b">>>>>>> ")) for line in head.splitlines()):
            return f"{path}: holds the marks of a merge conflict, expected {expected}; resolve it (`git status`)"
    return None


def reason_of(failure: BaseException) -> str:
    """Return what a library's error says, on one line of at most `MAX_REASON_CHARS`; its class if it says nothing."""
    text = " ".join(str(failure).split()) or type(failure).__name__
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}…"


def read_object(path: Path, *, remedy: str = COPY_AGAIN, error: FileError = DataError) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises `error` for anything else."""
    with reading(path, "JSON", remedy=remedy, error=error):
        # JSON finds the encoding of bytes by itself, also with a byte order mark.
        value = json.loads(path.read_bytes())
    if not isinstance(value, Mapping):
        raise error(
            instead(path, "JSON", remedy) or f"{path}: got a {type(value).__name__}, expected a JSON object; {remedy}"
        )
    return dict(value)
