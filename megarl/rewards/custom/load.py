"""Load a function from a user's Python file, and name the line of the file that an error comes from."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.host.reading import damage, require_file

FIX = "correct it"
RewardFunction = Callable[..., Any]


@cache
def load_function(path: Path, name: str) -> RewardFunction:
    """Load a function of a Python file; the file is executed at most once per process.

    Raises ConfigError if the file cannot be loaded, or has no such function; the message names file and line.
    """
    require_file(path, "a Python file with a reward function", remedy="set its path", error=ConfigError)
    file, module_name = str(path.absolute()), f"megarl_reward_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is None or loaded.__file__ != file:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path}: expected a Python file, its name ending in .py")
        loaded = importlib.util.module_from_spec(spec)
        # Dataclasses and pickle look modules up by name.
        sys.modules[module_name] = loaded
        try:
            spec.loader.exec_module(loaded)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            del sys.modules[module_name]
            # Python names no file if the text has null bytes.
            if isinstance(error, SyntaxError) and error.filename in (file, None):
                where = f"{path}:{error.lineno or 1}"
                raise ConfigError(damage(path, "Python", error, where=where, remedy=FIX)) from error
            raise ConfigError(f"{path}:{line_of(error, path)}: {type(error).__name__}: {error}; {FIX}") from error
    function = getattr(loaded, name, None)
    if not callable(function):
        others = [each for each, value in vars(loaded).items() if inspect.isfunction(value) and each[0] != "_"]
        raise ConfigError(f"{path}: has no function {name!r}, only {', '.join(others) or 'none'}; set its name")
    found: RewardFunction = function
    return found


def line_of(error: BaseException, path: Path) -> int:
    """Return the last line of the user's file that an error passed through, or 1 if it passed through none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if Path(frame.filename) == path.absolute()), 1)


def first_line(function: RewardFunction) -> int:
    """Return the line of its file in which a function begins; 1 for a callable object."""
    return function.__code__.co_firstlineno if inspect.isfunction(function) else 1
