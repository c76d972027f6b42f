"""Find and run the Python files of users, and name the line of a file that an error comes from."""

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from megarl.errors import ConfigError
from megarl.host.child_environment import SAFE_PATH
from megarl.host.reading import damage, reason_of

FIX = "correct it"
# A frame, as Python writes it into tracebacks and stacks.
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
# Where the files of others lie: megarl, the standard library, installed packages and programs.
_OTHERS = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib", "scripts")))
# Files that this process runs for users, wherever they lie.
_users: set[str] = set()


def search_here_last() -> None:
    """Let this process, and Python processes that it starts, look for modules in the current directory last of all.

    Modules that users name are found there, but a `secrets.py` takes the place of none. `child_environment` does not
    hand this on to users' programs, whose own directories come first.
    """
    os.environ.update(SAFE_PATH)
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def run_file(path: Path, module_name: str, source: bytes | None = None) -> ModuleType:
    """Run a Python file as a module of this process; the ConfigError about a mistake names file and line.

    source: what the file holds; None: read it.
    """
    note_user_file(path)
    file = str(path.absolute())
    module = ModuleType(module_name)
    module.__file__ = file
    # Dataclasses and pickle look modules up by name.
    sys.modules[module_name] = module
    try:
        code = compile(path.read_bytes() if source is None else source, file, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[module_name]
        raise mistake(path, error) from error
    return module


def note_user_file(path: Path) -> None:
    """From now on, name this file in messages about what users' code raises, even if it lies among packages."""
    _users.add(str(path.absolute()))


def mistake(path: Path, error: BaseException) -> ConfigError:
    """Return the error to raise for what a user's file raised when it was run."""
    # Python does not name the file of text with null bytes.
    if isinstance(error, SyntaxError) and error.filename in (str(path.absolute()), None):
        where = f"{path}:{error.lineno or 1}"
        return ConfigError(damage(path, "Python", error, where=where, remedy=FIX))
    where = f"{path}:{line_of(error, path)}"
    if type(error).__module__.startswith("megarl."):  # it says itself what to do
        return ConfigError(f"{where}: {error}")
    return ConfigError(f"{where}: {told(error)}")


def told(error: BaseException) -> str:
    """Return what users' code raised, and what to do about it, for a message that has named the place."""
    # The first part of a package's name is missing.
    lacking = error.name if isinstance(error, ModuleNotFoundError) else None
    remedy = f"install {lacking.partition('.')[0]}, or add its directory to PYTHONPATH" if lacking else FIX
    return f"{type(error).__name__}: {reason_of(error)}; {remedy}"


def place_of(error: BaseException) -> str:
    """Return the last line of a user's file that an error passed through, as FILE:LINE; empty if it passed none."""
    return _last_place((each.filename, each.lineno or 1) for each in traceback.extract_tb(error.__traceback__))


def place_in(text: str) -> str:
    """Return as `place_of` the last line of a user's file in a traceback that another process has written."""
    return _last_place((file, int(line)) for file, line in _FRAME.findall(text))


def _last_place(frames: Iterable[tuple[str, int]]) -> str:
    own = [f"{file}:{line}" for file, line in frames if is_users_file(file)]
    return own[-1] if own else ""


def is_users_file(file: str) -> bool:
    """Return whether a file is neither megarl's nor Python's nor that of an installed package nobody has named."""
    return file in _users or not file.startswith(("<", *_OTHERS))


def line_of(error: BaseException, path: Path) -> int:
    """Return the last line of the user's file that an error passed through, or 1 if it passed through none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if Path(frame.filename) == path.absolute()), 1)
