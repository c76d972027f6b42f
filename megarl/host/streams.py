"""Let a command name every file and say everything, whatever the encodings of its locale and its streams."""

import io
import os
import sys

_VARIABLE = "PYTHONIOENCODING"
# Handlers by which a character that the encoding lacks, or half of one from a file's name, ends the process.
_STRICT = ("", "strict", "surrogateescape")
_LENIENT = "backslashreplace"


def name_anything() -> None:
    """Start this command again in Python's UTF-8 mode if the locale's encoding has no name for some files.

    Its streams keep their encodings, and processes that it starts have the same mode.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault(_VARIABLE, sys.stdout.encoding)
        os.execv(sys.executable, [sys.executable, "-X", "utf8=1", *sys.orig_argv[1:]])


def write_anything() -> None:
    r"""Make this process's output, and that of all Python processes that it starts, escape what cannot be encoded.

    In ASCII, as `PYTHONIOENCODING=ascii` or the locale C ask for, `2×3` is written as `2\xd73`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _STRICT:
            stream.reconfigure(errors=_LENIENT)
    encoding, _, errors = os.environ.get(_VARIABLE, "").partition(":")
    if errors in _STRICT:
        os.environ[_VARIABLE] = f"{encoding}:{_LENIENT}"
