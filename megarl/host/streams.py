"""Let a command print any text and name any file, whatever the encodings of its streams."""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import TextIO

from megarl.host.unicode import visible

_VARIABLE = "PYTHONIOENCODING"
# Handlers by which a character that the encoding lacks, or half of one from a file's name, ends the process.
_STRICT = ("", "strict", "surrogateescape")
_LENIENT = "backslashreplace"
# How a line begins that warns, and the warnings of this process so far, which the report of a run repeats.
WARNING = "warning: "
warnings: list[str] = []
_loses = False


def use_utf8_mode() -> None:
    """Start this command again in Python's UTF-8 mode if the locale's encoding cannot spell some file names.

    Its streams keep their encodings, and processes that it starts have the same mode.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault(_VARIABLE, sys.stdout.encoding)
        os.execv(sys.executable, [sys.executable, "-X", "utf8=1", *sys.orig_argv[1:]])


def escape_unencodable() -> None:
    r"""Make this process's output, and that of all Python processes that it starts, escape what cannot be encoded.

    In ASCII, as `PYTHONIOENCODING=ascii` or the locale C ask for, `2×3` is written as `2\xd73`. An error that
    ends this process is printed as by `print_lines`. Streams that are closed, as by `>&-`, lead nowhere: otherwise the
    next file that is opened would get their number, and what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest number that is free, which other processes are to have, too.
            os.set_inheritable(nowhere := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _STRICT:
            stream.reconfigure(errors=_LENIENT)
    sys.excepthook = lambda *raised: print_lines(
        *"".join(traceback.format_exception(*raised)).rstrip("\n").split("\n"), file=sys.stderr
    )
    encoding, _, errors = os.environ.get(_VARIABLE, "").partition(":")
    if errors in _STRICT:
        os.environ[_VARIABLE] = f"{encoding}:{_LENIENT}"


def print_lines(*lines: object, file: TextIO | None = None) -> None:
    """Print each argument as one line, with everything hidden in it shown, and pass it on at once.

    Texts of models, tools, files and other processes can thus neither steer a terminal nor forge a line of a log.
    """
    with printing():
        print("".join(f"{shown(line)}\n" for line in lines), end="", file=file, flush=True)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Within this context, something is printed, which `losing_lines` allows to fail."""
    try:
        yield
    except OSError as error:
        if not _loses or isinstance(error, BrokenPipeError):
            raise


@contextlib.contextmanager
def losing_lines() -> Iterator[None]:
    """Within this context, output may be lost: neither a full disk nor a terminal that is gone ends a run."""
    global _loses
    _loses = True
    try:
        yield
    finally:
        _loses = False


def shown(line: object) -> str:
    """Return a line with everything hidden in it shown, and keep it if it warns."""
    text = visible(str(line))
    if text.startswith(WARNING):
        warnings.append(text.removeprefix(WARNING))
    return text
